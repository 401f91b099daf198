//! Somebody's entry: ours, or that of a shared object.

use std::ffi::{CStr, c_char, c_int};

use super::backward::{Backward, BackwardWorkspace, hattn_peer_bwd, hattn_peer_bwd_workspace};
use super::{
    Args, UNSUPPORTED, hattn_peer_biases, hattn_peer_caps, hattn_peer_fwd, hattn_peer_last_error, hattn_peer_name,
};
use super::{hattn_peer_adds, hattn_peer_drops, hattn_peer_lists, hattn_peer_packs, status_text};

/// Enqueues a forward: `hattn_peer_fwd` of some library.
pub type Forward = unsafe extern "C" fn(*const Args) -> c_int;
/// `hattn_peer_name` or `hattn_peer_last_error` of some library.
pub type Text = unsafe extern "C" fn() -> *const c_char;

/// `hattn_peer_packs`, `hattn_peer_caps`, `hattn_peer_biases`, `hattn_peer_lists`, `hattn_peer_drops` or `hattn_peer_adds` of some
/// library.
pub type Packs = unsafe extern "C" fn() -> c_int;

/// Somebody's entry.
#[derive(Clone, Copy)]
pub struct Entry {
    /// `hattn_peer_fwd`.
    pub forward: Forward,
    /// `hattn_peer_bwd`, where the library has it.
    pub backward: Option<Backward>,
    /// `hattn_peer_bwd_workspace`, where the library has it.
    pub backward_workspace: Option<BackwardWorkspace>,
    packs: Option<Packs>,
    caps: Option<Packs>,
    biases: Option<Packs>,
    lists: Option<Packs>,
    drops: Option<Packs>,
    adds: Option<Packs>,
    last_error: Option<Text>,
    name: Text,
}

impl Entry {
    /// That of this program.
    pub fn own() -> Self {
        Self {
            forward: hattn_peer_fwd,
            backward: Some(hattn_peer_bwd),
            backward_workspace: Some(hattn_peer_bwd_workspace),
            packs: Some(hattn_peer_packs),
            caps: Some(hattn_peer_caps),
            biases: Some(hattn_peer_biases),
            lists: Some(hattn_peer_lists),
            drops: Some(hattn_peer_drops),
            adds: Some(hattn_peer_adds),
            last_error: Some(hattn_peer_last_error),
            name: hattn_peer_name,
        }
    }

    /// That of a shared object, which stays loaded.
    ///
    /// # Errors
    /// When it cannot be loaded, or has no such entry.
    pub fn load(path: &str) -> Result<Self, String> {
        // What went wrong is in an error's source, and the name that was asked for in neither.
        let told = |what: String| {
            move |error: libloading::Error| match std::error::Error::source(&error) {
                Some(source) => format!("{what}: {error}: {source}"),
                None => format!("{what}: {error}"),
            }
        };
        // SAFETY: loading runs what the library runs on being loaded; whoever named it trusts it.
        let library = unsafe { libloading::Library::new(path) }.map_err(told(path.to_owned()))?;
        // A library's code must outlive all that may call it, CUDA's exit handlers too.
        let library: &'static libloading::Library = Box::leak(Box::new(library));
        let missing = |name: &str| told(format!("{path} has no {name}"));
        // SAFETY: these names have these types, as `hattn_peer.h` says.
        unsafe {
            Ok(Self {
                forward: *library.get::<Forward>(b"hattn_peer_fwd").map_err(missing("hattn_peer_fwd"))?,
                name: *library.get::<Text>(b"hattn_peer_name").map_err(missing("hattn_peer_name"))?,
                packs: library.get::<Packs>(b"hattn_peer_packs").ok().map(|f| *f),
                caps: library.get::<Packs>(b"hattn_peer_caps").ok().map(|f| *f),
                biases: library.get::<Packs>(b"hattn_peer_biases").ok().map(|f| *f),
                lists: library.get::<Packs>(b"hattn_peer_lists").ok().map(|f| *f),
                drops: library.get::<Packs>(b"hattn_peer_drops").ok().map(|f| *f),
                adds: library.get::<Packs>(b"hattn_peer_adds").ok().map(|f| *f),
                last_error: library.get::<Text>(b"hattn_peer_last_error").ok().map(|f| *f),
                backward: library.get::<Backward>(b"hattn_peer_bwd").ok().map(|f| *f),
                backward_workspace: library.get::<BackwardWorkspace>(b"hattn_peer_bwd_workspace").ok().map(|f| *f),
            })
        }
    }

    /// The short name.
    pub fn name(&self) -> String {
        // SAFETY: a function of the entry, which returns a string for the life of the process.
        unsafe { CStr::from_ptr((self.name)()) }.to_string_lossy().into_owned()
    }

    /// Whether its functions take packed sequences. Others would take all tokens for one sequence.
    pub fn packs(&self) -> bool {
        // SAFETY: a function of the entry without arguments.
        self.packs.is_some_and(|packs| unsafe { packs() } == 1)
    }

    /// Whether its functions take a cap of the scores. Others would not look at it.
    pub fn caps(&self) -> bool {
        // SAFETY: a function of the entry without arguments.
        self.caps.is_some_and(|caps| unsafe { caps() } == 1)
    }

    /// Whether its functions take ALiBi's slopes. Others would not look at them.
    pub fn biases(&self) -> bool {
        // SAFETY: as above.
        self.biases.is_some_and(|biases| unsafe { biases() } == 1)
    }

    /// Whether its functions take lists of blocks. Others would not look at them.
    pub fn lists(&self) -> bool {
        // SAFETY: as above.
        self.lists.is_some_and(|lists| unsafe { lists() } == 1)
    }

    /// Whether its functions take dropout, and keep the pairs that the library defines. Others would not look at it.
    pub fn drops(&self) -> bool {
        // SAFETY: as above.
        self.drops.is_some_and(|drops| unsafe { drops() } == 1)
    }

    /// Whether its functions take an additive bias, and its backward gives the gradient. Others would not look at it.
    pub fn adds(&self) -> bool {
        // SAFETY: as above.
        self.adds.is_some_and(|adds| unsafe { adds() } == 1)
    }

    /// What a status means, with the library's own words where it has some.
    pub fn complaint(&self, status: c_int) -> String {
        let text = status_text(status);
        let Some(last_error) = self.last_error else { return text };
        // SAFETY: a function of the entry, whose string is valid until this thread's next call.
        let own = unsafe { CStr::from_ptr(last_error()) }.to_string_lossy();
        if own.is_empty() { text } else { format!("{text}: {own}") }
    }

    /// Whether a status means that there is no kernel for a legal problem.
    pub fn unsupported(status: c_int) -> bool {
        status == UNSUPPORTED
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_is_the_reports() {
        let own = Entry::own();
        assert_eq!((own.name().as_str(), own.packs(), own.caps(), own.biases()), (crate::NAME, true, true, true));
        assert!(own.lists() && own.drops() && own.adds());
    }

    #[test]
    fn a_library_without_the_entry_is_refused() {
        let Err(why) = Entry::load("libm.so.6") else { panic!("libm computes no attention") };
        assert!(why.contains("hattn_peer_fwd"), "{why}");
        assert!(Entry::load("libnowhere.so").is_err_and(|why| why.contains("libnowhere.so")));
    }
}
