//! Markdown: how long it is, and the paths that it names, in links, in code between backticks, in fenced code, and in the
//! attributes of its HTML.

use std::collections::BTreeSet;

/// A line of prose is no longer, in characters: it fits an editor's window.
pub const WIDTH: usize = 119;

/// The README has no more lines: a newcomer reads it in five minutes. What is longer goes to `docs/`.
pub const README_LINES: usize = 149;

/// The lines of prose that are longer than [`WIDTH`], with their lengths. Code, tables and HTML cannot be broken, and may be
/// longer.
pub fn long_lines(text: &str) -> Vec<(usize, usize)> {
    let mut fenced = false;
    let mut long = Vec::new();
    for (number, line) in (1..).zip(text.lines()) {
        let begin = line.trim_start();
        if begin.starts_with("```") {
            fenced = !fenced;
        }
        let length = line.chars().count();
        if !fenced && !begin.starts_with(['|', '<']) && length > WIDTH {
            long.push((number, length));
        }
    }
    long
}

/// Every file and folder of the repository.
pub struct Paths {
    all: BTreeSet<String>,
}

/// Files that are named by these endings are sources, and ours; others may be what a command writes.
const SOURCES: [&str; 15] =
    [".rs", ".hpp", ".h", ".cuh", ".cu", ".cc", ".cpp", ".c", ".def", ".py", ".sh", ".md", ".cmake", ".awk", ".toml"];

/// Files of others, which are named as such.
const FOREIGN: [&str; 4] = ["dlpack/dlpack.h", "hopper/flash_api.cpp", "mine.cpp", "setup.py"];

impl Paths {
    pub fn new<'a>(files: impl Iterator<Item = &'a str>) -> Self {
        let mut all = BTreeSet::new();
        for file in files {
            let mut rest = file;
            all.insert(rest.to_owned());
            while let Some((folder, _)) = rest.rsplit_once('/') {
                all.insert(folder.to_owned());
                rest = folder;
            }
        }
        Self { all }
    }

    /// The paths that a Markdown file names and that do not exist, with their lines.
    pub fn missing(&self, file: &str, text: &str) -> Vec<(usize, String)> {
        let mut missing = Vec::new();
        let mut fenced = false;
        for (number, line) in (1..).zip(text.lines()) {
            if line.trim_start().starts_with("```") {
                fenced = !fenced;
                continue;
            }
            let spans = || line.split('`');
            let code: Vec<&str> = if fenced { vec![line] } else { spans().skip(1).step_by(2).collect() };
            if !fenced {
                // In a link's text there may be code, and in code what looks like a link.
                let text: Vec<&str> = spans().step_by(2).collect();
                let text = text.join("`");
                missing
                    .extend(links(&text).filter(|link| !self.leads(file, link)).map(|link| (number, link.to_owned())));
            }
            let words = code
                .into_iter()
                .flat_map(str::split_whitespace)
                .map(|word| word.trim_matches(PUNCTUATION).trim_end_matches('.'));
            for word in words.filter(|word| self.is_path(word)) {
                if !self.exists(word.trim_end_matches('/')) {
                    missing.push((number, word.to_owned()));
                }
            }
        }
        missing
    }

    /// Whether a word of code is a path of this repository: a name below one of its folders, a source, or a folder.
    fn is_path(&self, word: &str) -> bool {
        let plain = !word.is_empty() && word.chars().all(|c| c.is_ascii_alphanumeric() || "_-./".contains(c));
        let parts = || word.split('/').filter(|part| !part.is_empty());
        // What is fetched, built or written, and what stands for a name: `PREFIX`, `DATE`, `smXX`.
        let outside = word.starts_with(['/', '.', '-']) || parts().next().is_some_and(|first| first == "target");
        let stands_for =
            parts().any(|part| part.len() > 1 && part.chars().all(|c| c.is_ascii_uppercase()) || part.contains("XX"));
        if !plain || outside || stands_for || FOREIGN.contains(&word) || parts().count() == 0 {
            return false;
        }
        let top = word.split_once('/').is_some_and(|(first, _)| self.all.contains(first));
        top || word.ends_with('/') || SOURCES.iter().any(|end| word.ends_with(end) && word.len() > end.len())
    }

    /// A path is named from the root, or by its last parts.
    fn exists(&self, path: &str) -> bool {
        let end = format!("/{path}");
        self.all.contains(path) || self.all.iter().any(|known| known.ends_with(&end))
    }

    /// A link is relative to the file's folder.
    fn leads(&self, file: &str, link: &str) -> bool {
        let target = link.split(['#', '?']).next().unwrap_or(link).trim_end_matches('/');
        if target.is_empty() || link.contains("://") || link.starts_with("mailto:") {
            return true;
        }
        let mut parts: Vec<&str> = file.split('/').collect();
        parts.pop();
        for part in target.split('/') {
            match part {
                "." => (),
                ".." => {
                    if parts.pop().is_none() {
                        return false;
                    }
                }
                part => parts.push(part),
            }
        }
        parts.is_empty() || self.all.contains(&parts.join("/"))
    }
}

const PUNCTUATION: &[char] = &[',', ';', ':', '(', ')', '"', '\'', '…'];

/// What a line's Markdown links and the `src` and `href` of its HTML lead to.
fn links(line: &str) -> impl Iterator<Item = &str> {
    let ends = [("](", ')'), ("src=\"", '"'), ("href=\"", '"')];
    ends.into_iter()
        .flat_map(move |(open, close)| line.split(open).skip(1).filter_map(move |rest| rest.split(close).next()))
}
