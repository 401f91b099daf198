//! Signals. Temporary files go away when one ends the process, and a file that may not grow is an error like any other.

use std::fs::remove_file;
use std::io::{Error, ErrorKind, Result};
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;

use signal_hook::consts::signal::{SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGXCPU, SIGXFSZ};
use signal_hook::iterator::Signals;
use signal_hook::low_level::emulate_default_handler;
use tempfile::NamedTempFile;

/// The signals that end a process, and that a user, a terminal or a system sends to do so.
const ENDING: [i32; 5] = [SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGXCPU];

/// The temporary files that there are now.
static TEMPORARY: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

fn temporary() -> MutexGuard<'static, Vec<PathBuf>> {
    TEMPORARY.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A write past the limit on the size of files (`ulimit -f`) fails, and ends the process no longer.
pub fn fail_writes_past_the_limit() {
    static SENT: AtomicBool = AtomicBool::new(false);
    // Any handler does. Where none can be had, the signal ends the process as before.
    let _ = signal_hook::flag::register(SIGXFSZ, &SENT);
}

/// A place in the list of temporary files, until it is dropped.
pub struct Listed(PathBuf);

impl Drop for Listed {
    fn drop(&mut self) {
        temporary().retain(|path| *path != self.0);
    }
}

/// Makes a temporary file that is removed if a signal ends the process while the file is listed.
pub fn removed_by_signals(make: impl FnOnce() -> Result<NamedTempFile>) -> Result<(NamedTempFile, Listed)> {
    static WATCH: OnceLock<std::result::Result<(), ErrorKind>> = OnceLock::new();
    WATCH.get_or_init(|| start().map_err(|error| error.kind())).map_err(Error::from)?;
    // A signal that comes now waits until the file is in the list.
    let mut all = temporary();
    let file = make()?;
    all.push(file.path().into());
    let listed = Listed(file.path().into());
    Ok((file, listed))
}

/// Starts the thread that waits for signals. Returns once it would notice one.
fn start() -> Result<()> {
    let (ready, started) = channel();
    thread::Builder::new().name("signals".into()).spawn(move || watch(ready))?;
    started.recv().unwrap_or_else(|_| Err(ErrorKind::Other.into()))
}

fn watch(ready: Sender<Result<()>>) {
    let ignored = ignored();
    let listened = ENDING.iter().filter(|&signal| ignored >> (signal - 1) & 1 == 0);
    let mut signals = match Signals::new(listened) {
        Ok(signals) => signals,
        Err(error) => return drop(ready.send(Err(error))),
    };
    let _ = ready.send(Ok(()));
    for signal in signals.forever() {
        // Held to the end, so that no other file is made meanwhile.
        let all = temporary();
        for path in all.iter() {
            let _ = remove_file(path); // it may have got its name just now
        }
        // Ends the process by the signal, as if nobody had listened.
        let _ = emulate_default_handler(signal);
    }
}

/// A bit for each signal that whoever started the process wants ignored, as `nohup` does. Linux tells; elsewhere there is none.
fn ignored() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
}
