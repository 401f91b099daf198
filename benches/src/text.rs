//! Text from outside: files that are read, and what of them, of arguments and of other programs goes to a terminal.

use std::fs::File;
use std::io::Read as _;
use std::path::Path;

use anyhow::{Context as _, Result, ensure};

/// The longest text file that is read, in bytes. Reports and tunings have some 100 kB.
const MAX_BYTES: u64 = 16 << 20;

/// Opens a regular file for reading.
///
/// Other kinds are refused by name. Opening a pipe waits for a writer, who may never come, and a device may have no end.
///
/// # Errors
/// When the path leads to no regular file, or the file cannot be opened.
pub fn open(path: &Path) -> Result<File> {
    let about = path.metadata().context("cannot be opened")?;
    ensure!(!about.is_dir(), "a folder; allowed: a regular file");
    ensure!(about.is_file(), "not a regular file (a pipe, a socket or a device); allowed: a regular file");
    File::open(path).context("cannot be opened")
}

/// Reads a text file.
///
/// # Errors
/// Those of [`open`], and when the file is longer than 16 MiB, is not UTF-8 or cannot be read.
pub fn read(path: &Path) -> Result<String> {
    let mut text = String::new();
    // One byte more than allowed tells a file that is too long.
    let bytes = open(path)?.take(MAX_BYTES + 1).read_to_string(&mut text).context("cannot be read")?;
    ensure!(bytes as u64 <= MAX_BYTES, "more than {MAX_BYTES} bytes; allowed: up to {MAX_BYTES}");
    Ok(text)
}

/// "512", or "16k" for a multiple of 1024.
pub(crate) fn thousands(number: usize) -> String {
    if number >= 1024 && number.is_multiple_of(1024) { format!("{}k", number / 1024) } else { number.to_string() }
}

/// The text without anything that steers a terminal: control characters, and those that reorder or break lines, become
/// escapes such as `\u{1b}`.
pub fn printable(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}' => {
                shown.extend(character.escape_unicode())
            }
            control if control.is_control() => shown.extend(control.escape_default()),
            other => shown.push(other),
        }
    }
    shown
}

/// As [`printable`]. Of a text with more than `most` characters only both ends are shown, and how many are left out.
pub fn excerpt(text: &str, most: usize) -> String {
    let count = text.chars().count();
    if count <= most {
        return printable(text);
    }
    let end = most / 2;
    let head: String = text.chars().take(end).collect();
    let tail: String = text.chars().skip(count - end).collect();
    format!("{}[... {} characters ...]{}", printable(&head), count - 2 * end, printable(&tail))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_steers_a_terminal_becomes_an_escape() {
        assert_eq!(printable("a\u{1b}[2J\r\n\u{7f}\u{9b}é ü"), "a\\u{1b}[2J\\r\\n\\u{7f}\\u{9b}é ü");
        assert_eq!(printable("\u{202e}txt\u{2066}"), "\\u{202e}txt\\u{2066}");
    }

    #[test]
    fn long_texts_keep_both_ends() {
        assert_eq!(excerpt("abcdef", 6), "abcdef");
        assert_eq!(excerpt("abcdefg", 4), "ab[... 3 characters ...]fg");
        assert_eq!(excerpt("\u{1b}ééééé\u{1b}", 2), "\\u{1b}[... 5 characters ...]\\u{1b}");
    }

    #[test]
    fn only_regular_files_of_a_sensible_length_are_read() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("long");
        let refused = |path: &Path| format!("{:#}", read(path).expect_err("it was read"));
        assert_eq!(refused(folder.path()), "a folder; allowed: a regular file");
        assert!(refused(Path::new("/dev/null")).starts_with("not a regular file"));
        assert!(refused(&path).starts_with("cannot be opened: No such file"));
        let long = File::create(&path).expect("a file");
        long.set_len(MAX_BYTES).expect("a length");
        assert_eq!(read(&path).expect("as long as allowed").len() as u64, MAX_BYTES);
        long.set_len(MAX_BYTES + 1).expect("a length");
        assert_eq!(refused(&path), "more than 16777216 bytes; allowed: up to 16777216");
    }
}
