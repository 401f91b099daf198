//! Tells how much of the work of the oracle and of the plain computation is done.

use std::sync::atomic::{AtomicU64, Ordering};

/// What is told the share of the work that is done, from 0 to 1. Any thread may tell it.
pub(super) type Told<'a> = &'a (dyn Fn(f64) + Sync);

/// How long a row takes in each part: 64 or 128 elements a head, and as many keys. A unit is the time of a row of the
/// plain forward.
pub(super) const PLAIN_UNITS: u64 = 1;
pub(super) const ORACLE_UNITS: u64 = 2;
pub(super) const PLAIN_BACKWARD_UNITS: u64 = 3;
pub(super) const ORACLE_QUERY_UNITS: u64 = 3;
pub(super) const ORACLE_KEY_UNITS: u64 = 3;

/// The units of a forward's rows. `rows` is the number of queries of all heads.
pub(super) fn forward_units(rows: usize) -> u64 {
    (PLAIN_UNITS + ORACLE_UNITS) * rows as u64
}

/// The same of a backward. `keys` is the number of keys of all query heads.
pub(super) fn backward_units(rows: usize, keys: usize) -> u64 {
    (PLAIN_UNITS + PLAIN_BACKWARD_UNITS + ORACLE_QUERY_UNITS) * rows as u64 + ORACLE_KEY_UNITS * keys as u64
}

/// Work in units of about one time each.
pub(super) struct Work<'a> {
    told: Option<Told<'a>>,
    done: AtomicU64,
    total: u64,
}

impl<'a> Work<'a> {
    /// Tells nobody.
    pub(super) fn silent() -> Self {
        Self { told: None, done: AtomicU64::new(0), total: 0 }
    }

    pub(super) fn new(told: Told<'a>, total: u64) -> Self {
        Self { told: Some(told), done: AtomicU64::new(0), total }
    }

    /// So many units more are done.
    pub(super) fn add(&self, units: u64) {
        let Some(told) = self.told else { return };
        let done = self.done.fetch_add(units, Ordering::Relaxed) + units;
        told(done.min(self.total) as f64 / self.total.max(1) as f64);
    }
}
