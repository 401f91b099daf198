//! The Rust harness: every library computes a point, is checked, and is timed in turn with the others.

use std::collections::BTreeMap;
use std::time::Instant;

use anyhow::{Context as _, Result};
use hopper_attention::{Layout, Operand, bf16, f16};
use rand::rngs::SmallRng;
use rand::{Rng as _, SeedableRng as _};
use rand_distr::StandardNormal;

use super::check::{Inputs, check, cross};
use super::{Event, Job, RawRun, Sink, WARM_UPS};
use crate::{Order, Point, Precision, Role, RunStatus, quantile};

/// Why a library does not compute a point.
#[derive(Debug)]
pub(super) enum Refusal {
    /// It has no kernel for it.
    Unsupported(String),
    /// Its call failed.
    Failed(String),
}

impl From<hopper_attention::Error> for Refusal {
    fn from(error: hopper_attention::Error) -> Self {
        match error {
            hopper_attention::Error::Unsupported { .. } => Self::Unsupported(error.to_string()),
            _ => Self::Failed(error.to_string()),
        }
    }
}

impl From<anyhow::Error> for Refusal {
    fn from(error: anyhow::Error) -> Self {
        Self::Failed(format!("{error:#}"))
    }
}

/// A point and where its tensors' elements lie.
pub(super) struct Task<'a> {
    pub point: &'a Point,
    /// Of Q and O.
    pub q: Layout<4>,
    /// Of K and V.
    pub kv: Layout<4>,
    pub lse: Layout<3>,
}

impl<'a> Task<'a> {
    fn new(point: &'a Point, order: Order) -> hopper_attention::Result<Self> {
        Ok(Self {
            point,
            q: point.layout(point.heads_q, order)?,
            kv: point.layout(point.heads_kv, order)?,
            lse: Layout::contiguous([point.batch, point.heads_q, point.seqlen])?,
        })
    }
}

/// A library at work on one point after the other.
pub(super) trait Contestant<T> {
    fn name(&self) -> &str;
    fn role(&self) -> Role;
    /// Gets ready for a point; its outputs are full of NaN afterwards.
    fn prepare(&mut self, task: &Task<'_>) -> Result<(), Refusal>;
    /// One forward, done or enqueued.
    fn call(&mut self, task: &Task<'_>) -> Result<(), Refusal>;
    /// O, laid out as Q, and the contiguous LSE, once all calls are done.
    fn outputs(&mut self) -> Result<(Vec<T>, Vec<f32>)>;
}

/// What times calls.
pub(super) trait Clock {
    /// Makes a call, with the caches as a stranger leaves them.
    fn time(&mut self, call: &mut dyn FnMut() -> Result<(), Refusal>) -> Result<(), Refusal>;
    /// Waits until all is done; the milliseconds of each call since the last wait.
    fn wait(&mut self) -> Result<Vec<f64>>;
}

/// What the harness runs on.
pub(super) trait Place {
    type Clock: Clock;
    fn clock(&self) -> Result<Self::Clock>;
    /// The libraries, over inputs that the longest point just fills: a point takes the front.
    fn contestants<'a, T: Operand<Out = T>>(&'a self, pool: &'a Pool<T>) -> Result<Vec<Box<dyn Contestant<T> + 'a>>>;
}

/// Unit-variance normal Q, K and V.
pub(super) struct Pool<T> {
    pub q: Vec<T>,
    pub k: Vec<T>,
    pub v: Vec<T>,
}

impl<T: Operand> Pool<T> {
    fn new(points: &[&Point], seed: u64) -> Self {
        let most = |heads: fn(&Point) -> usize| points.iter().map(|p| p.elements(heads(p))).max().unwrap_or(0);
        let mut rng = SmallRng::seed_from_u64(seed);
        let mut draw = |count| (0..count).map(|_| T::from_f32(rng.sample(StandardNormal))).collect();
        Self { q: draw(most(|p| p.heads_q)), k: draw(most(|p| p.heads_kv)), v: draw(most(|p| p.heads_kv)) }
    }
}

/// Times every point, a type at a time so that the inputs are drawn once.
pub(super) fn run<P: Place>(place: &P, job: &Job, sink: Sink<'_>) -> Result<()> {
    let mut clock = place.clock()?;
    for dtype in [Precision::Bf16, Precision::F16] {
        let points = job.points.iter().enumerate().filter(|(_, point)| point.dtype == dtype);
        let points: Vec<(usize, &Point)> = points.collect();
        if points.is_empty() {
            continue;
        }
        match dtype {
            Precision::Bf16 => run_as::<bf16, P>(place, &mut clock, job, &points, sink)?,
            Precision::F16 => run_as::<f16, P>(place, &mut clock, job, &points, sink)?,
        }
    }
    Ok(())
}

fn run_as<T: Operand<Out = T>, P: Place>(
    place: &P,
    clock: &mut P::Clock,
    job: &Job,
    points: &[(usize, &Point)],
    sink: Sink<'_>,
) -> Result<()> {
    let pool = Pool::<T>::new(&points.iter().map(|&(_, point)| point).collect::<Vec<_>>(), job.seed);
    let mut contestants = place.contestants(&pool)?;
    for &(index, point) in points {
        let task = Task::new(point, job.layout)?;
        let runs = run_point(&task, &pool, &mut contestants, clock, job.iters, &mut |event| match event {
            Some(name) => sink(Event::Library { index, name }),
            None => sink(Event::Timing { index }),
        });
        let runs = runs.with_context(|| format!("at {point}"))?;
        sink(Event::Point { index, runs })?;
    }
    Ok(())
}

fn run_point<T: Operand<Out = T>>(
    task: &Task<'_>,
    pool: &Pool<T>,
    contestants: &mut [Box<dyn Contestant<T> + '_>],
    clock: &mut dyn Clock,
    iters: usize,
    tell: &mut dyn FnMut(Option<String>) -> Result<()>,
) -> Result<Vec<RawRun>> {
    let inputs = Inputs { q: &pool.q, k: &pool.k, v: &pool.v, q_layout: task.q, kv_layout: task.kv };
    let (mut runs, mut right, mut agreed) = (Vec::new(), Vec::new(), None::<Vec<T>>);
    for (who, contestant) in contestants.iter_mut().enumerate() {
        tell(Some(contestant.name().to_owned()))?;
        let mut run = RawRun {
            name: contestant.name().into(),
            role: contestant.role(),
            status: RunStatus::Ok,
            error: None,
            check: BTreeMap::new(),
            host_us: None,
            ms: vec![],
        };
        let called = contestant.prepare(task).and_then(|()| clock.time(&mut || contestant.call(task)));
        // After a failed call too: what it may have left behind is not the next one's.
        clock.wait()?;
        match called {
            Err(Refusal::Unsupported(why)) => (run.status, run.error) = (RunStatus::Unsupported, Some(why)),
            Err(Refusal::Failed(why)) => (run.status, run.error) = (RunStatus::Failed, Some(why)),
            Ok(()) => {
                let (o, lse) = contestant.outputs()?;
                (run.check, run.error) = check(task.point, &inputs, &o, &lse);
                if let Some(agreed) = &agreed {
                    let apart = cross(task.point, &task.q, &o, agreed, &mut run.check);
                    run.error = run.error.or(apart);
                }
                if run.error.is_some() {
                    run.status = RunStatus::Wrong;
                } else {
                    right.push((who, o.clone(), lse));
                    agreed.get_or_insert(o);
                }
            }
        }
        runs.push(run);
    }
    if right.is_empty() {
        return Ok(runs);
    }
    tell(None)?;
    let mut host: Vec<Vec<f64>> = vec![Vec::new(); contestants.len()];
    for round in 0..WARM_UPS + iters {
        // The order rotates, so that nobody always follows the same neighbour.
        let turns = right.iter().cycle().skip(round % right.len()).take(right.len()).map(|(who, ..)| *who);
        let turns: Vec<usize> = turns.collect();
        for &who in &turns {
            let mut took = 0.0;
            let called = clock.time(&mut || {
                let start = Instant::now();
                let called = contestants[who].call(task);
                took = start.elapsed().as_secs_f64() * 1e6;
                called
            });
            called.map_err(|refusal| anyhow::anyhow!("{} computed it before: {refusal:?}", contestants[who].name()))?;
            host[who].push(took);
        }
        let ms = clock.wait()?;
        if round >= WARM_UPS {
            for (who, ms) in turns.into_iter().zip(ms) {
                runs[who].ms.push(ms);
            }
        }
    }
    for (who, o, lse) in right {
        runs[who].host_us = quantile(&host[who][WARM_UPS..], 0.5);
        let (after, lse_after) = contestants[who].outputs()?;
        let same = |a: &[f32], b: &[f32]| a.iter().map(|x| x.to_bits()).eq(b.iter().map(|x| x.to_bits()));
        let bits = |x: &[T]| x.iter().map(|x| x.to_f32()).collect::<Vec<_>>();
        if !(same(&bits(&o), &bits(&after)) && same(&lse, &lse_after)) {
            runs[who].status = RunStatus::Wrong;
            runs[who].error = Some("the output changed between runs on the same inputs".into());
        }
    }
    Ok(runs)
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;
    use crate::Sweep;
    use crate::harness::cpu::{Backend, WallClock};

    /// The CPU backend with something wrong.
    struct Broken<'a> {
        inner: Backend<'a, bf16>,
        how: &'static str,
        calls: usize,
        log: &'a RefCell<String>,
    }

    impl Contestant<bf16> for Broken<'_> {
        fn name(&self) -> &str {
            self.how
        }

        fn role(&self) -> Role {
            Role::Peer
        }

        fn prepare(&mut self, task: &Task<'_>) -> Result<(), Refusal> {
            match self.how {
                "unsupported" => Err(Refusal::Unsupported("no kernel".into())),
                _ => self.inner.prepare(task),
            }
        }

        fn call(&mut self, task: &Task<'_>) -> Result<(), Refusal> {
            self.calls += 1;
            self.log.borrow_mut().push_str(&self.how[..1]);
            if self.how == "failing" {
                return Err(Refusal::Failed("it broke".into()));
            }
            self.inner.call(task)
        }

        fn outputs(&mut self) -> Result<(Vec<bf16>, Vec<f32>)> {
            let (mut o, lse) = self.inner.outputs()?;
            match self.how {
                "wrong" => o[0] = bf16::from_f32(9.0),
                "drifting" if self.calls > 1 => o[0] = bf16::from_f32(o[0].to_f32() + 0.01),
                _ => (),
            }
            Ok((o, lse))
        }
    }

    #[test]
    fn what_is_not_right_is_named_and_the_others_take_turns() {
        let sweep = Sweep {
            hidden: 128,
            tokens: 64,
            seqlens: vec![32],
            filters: vec!["bf16/d64/causal".into()],
            ..Sweep::small()
        };
        let point = sweep.points().unwrap().remove(0);
        let (pool, log) = (Pool::<bf16>::new(&[&point], 1), RefCell::default());
        let broken = |how| Broken { inner: Backend::new(&pool), how, calls: 0, log: &log };
        let mut contestants: Vec<Box<dyn Contestant<bf16> + '_>> = vec![Box::new(Backend::new(&pool))];
        for how in ["unsupported", "failing", "wrong", "drifting", "fine"] {
            contestants.push(Box::new(broken(how)));
        }
        let task = Task::new(&point, Order::Bhsd).unwrap();
        let mut told = Vec::new();
        let runs = run_point(&task, &pool, &mut contestants, &mut WallClock::default(), 4, &mut |event| {
            told.push(event.unwrap_or("timing".into()));
            Ok(())
        });
        drop(contestants);
        assert_eq!(told[1..], ["unsupported", "failing", "wrong", "drifting", "fine", "timing"]);
        let runs = runs.unwrap();
        use RunStatus::{Failed, Unsupported, Wrong};
        let status: Vec<_> = runs.iter().map(|run| (run.status, run.ms.len())).collect();
        assert_eq!(
            status,
            [(RunStatus::Ok, 4), (Unsupported, 0), (Failed, 0), (Wrong, 0), (Wrong, 4), (RunStatus::Ok, 4)]
        );
        assert_eq!(runs[1].error.as_deref(), Some("no kernel"));
        assert!(runs[3].error.as_ref().unwrap().starts_with("row "), "{:?}", runs[3].error);
        assert!(runs[4].error.as_ref().unwrap().contains("changed between runs"));
        assert!(runs[5].check["cross"].is_f64() && runs[5].host_us > Some(0.0));
        // Once each to be checked, then seven rounds in which the order rotates.
        assert_eq!(log.into_inner(), "fwdf".to_owned() + "df" + "df" + "fd" + "df" + "df" + "fd" + "df");
    }
}
