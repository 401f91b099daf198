//! The Rust harness: every library computes a point, is checked, and is timed in turn with the others.

use std::collections::BTreeMap;
use std::time::Instant;

use anyhow::{Context as _, Result, bail};
use hopper_attention::{Float, bf16, f16};

use super::check::{Expected, changed, cross, number};
use super::contest::{Clock, Contestant, Contestants, Outputs, Place, Pool, Refusal, Task};
use super::{Event, Job, RawRun, Sink, WARM_UPS};
use crate::{DENSE, Direction, Point, Precision, Role, RunStatus, quantile};

/// Refuses points that this harness has no way to compute.
///
/// # Errors
/// When there are such points.
pub(super) fn sixteen_bits(job: &Job) -> Result<()> {
    let other = job.points.iter().find(|point| point.dtype == Precision::E4m3);
    other.map_or(Ok(()), |point| {
        bail!("{point}: e4m3 operands are timed by the harness in PyTorch alone; allowed here: --dtypes bf16,f16")
    })
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
            Precision::E4m3 => sixteen_bits(job)?,
        }
    }
    Ok(())
}

fn run_as<T: Float, P: Place>(
    place: &P,
    clock: &mut P::Clock,
    job: &Job,
    points: &[(usize, &Point)],
    sink: Sink<'_>,
) -> Result<()> {
    // Normal values are drawn once, and each point takes the front. Others depend on where a row is.
    let (normal, others): (Vec<_>, Vec<_>) = points.iter().copied().partition(|(_, point)| point.is_normal());
    if !normal.is_empty() {
        let sizes: Vec<&Point> = normal.iter().map(|&(_, point)| point).collect();
        let pool = Pool::<T>::new(&sizes, job.seed).context("drawing the inputs")?;
        run_pool(place, clock, job, &pool, &normal, sink)?;
    }
    for one in others {
        let pool = Pool::<T>::of(&Task::new(one.1, job.layout)?, job.seed, &job.files).context("drawing the inputs")?;
        run_pool(place, clock, job, &pool, &[one], sink)?;
    }
    Ok(())
}

/// The points of one pool.
fn run_pool<T: Float, P: Place>(
    place: &P,
    clock: &mut P::Clock,
    job: &Job,
    pool: &Pool<T>,
    points: &[(usize, &Point)],
    sink: Sink<'_>,
) -> Result<()> {
    let any = |direction| points.iter().any(|(_, point)| point.direction == direction);
    let mut forwards = place.forwards(pool)?;
    let mut backwards = if any(Direction::Bwd) { place.backwards(pool)? } else { vec![] };
    // What computes the dense batches beside packed points. It has memory of its own.
    let (mut dense_forward, mut dense_backward) = (None, None);
    if points.iter().any(|(_, point)| point.packed.is_some()) {
        dense_forward = place.forwards(pool).map(ours)?;
        dense_backward = if any(Direction::Bwd) { place.backwards(pool).map(ours)? } else { None };
    }
    for &(index, point) in points {
        let mut tell = |event: Option<String>| match event {
            Some(name) => sink(Event::Library { index, name }),
            None => sink(Event::Timing { index }),
        };
        let dense = point.dense();
        let bias = point.bias_numbers(job.seed)?;
        let mut tasks: Vec<Task<'_, T>> = vec![Task { bias: bias.as_ref(), ..Task::new(point, job.layout)? }];
        let bias_of_dense = dense.as_ref().map(|dense| dense.bias_numbers(job.seed)).transpose()?.flatten();
        if let Some(dense) = &dense {
            tasks.push(Task { bias: bias_of_dense.as_ref(), ..Task::new(dense, job.layout)? });
        }
        let saved: Result<Result<Vec<_>, String>> = match point.direction {
            Direction::Fwd => Ok(Ok(vec![])),
            Direction::Bwd => tasks
                .iter()
                .map(|task| save(task, pool, &mut forwards, clock))
                .collect::<Result<_>>()
                .map(|saved: Vec<_>| saved.into_iter().collect()),
        };
        let runs = saved.and_then(|saved| {
            let (contestants, second) = match point.direction {
                Direction::Fwd => (&mut forwards, &mut dense_forward),
                Direction::Bwd => (&mut backwards, &mut dense_backward),
            };
            let saved = match saved {
                Ok(saved) => saved,
                Err(why) => {
                    return Ok(contestants.iter().map(|x| refused(&**x, RunStatus::Failed, why.clone())).collect());
                }
            };
            let tasks: Vec<_> =
                tasks.iter().enumerate().map(|(i, task)| Task { saved: saved.get(i), ..*task }).collect();
            let expected: Vec<_> = tasks.iter().map(|task| Expected::new(task, pool)).collect();
            let mut entrants = entrants(contestants, &expected[0]);
            if let (Some(second), Some(expected)) = (second, expected.get(1)) {
                entrants.push(Entrant::new(second, expected, true));
            }
            run_point(&mut entrants, clock, job.iters, &mut tell)
        });
        let runs = match point.direction {
            Direction::Fwd => runs.and_then(|runs| more_draws(place, &tasks[0], job, runs)),
            Direction::Bwd => runs,
        };
        let runs = runs.with_context(|| format!("at {point}"))?;
        sink(Event::Point { index, runs })?;
    }
    Ok(())
}

/// Our own of several.
fn ours<'a, T>(contestants: Contestants<'a, T>) -> Option<Box<dyn Contestant<T> + 'a>> {
    contestants.into_iter().find(|x| x.role() == Role::Ours)
}

/// A library at a point, and what its outputs are held against.
struct Entrant<'e, T> {
    name: String,
    contestant: &'e mut (dyn Contestant<T> + 'e),
    expected: &'e Expected<'e, T>,
    /// Whether it is our second run, on the dense batch of a packed point.
    second: bool,
}

impl<'e, T> Entrant<'e, T> {
    fn new(contestant: &'e mut Box<dyn Contestant<T> + '_>, expected: &'e Expected<'e, T>, second: bool) -> Self {
        let name = format!("{}{}", contestant.name(), if second { DENSE } else { "" });
        Self { name, contestant: &mut **contestant, expected, second }
    }
}

/// Libraries that compute the same.
fn entrants<'e, T>(
    contestants: &'e mut [Box<dyn Contestant<T> + '_>],
    expected: &'e Expected<'e, T>,
) -> Vec<Entrant<'e, T>> {
    contestants.iter_mut().map(|contestant| Entrant::new(contestant, expected, false)).collect()
}

/// Replaces the error of each O that is right by its mean over more draws of the inputs.
fn more_draws<T: Float, P: Place>(
    place: &P,
    task: &Task<'_, T>,
    job: &Job,
    mut runs: Vec<RawRun>,
) -> Result<Vec<RawRun>> {
    let read = |run: &RawRun| Some([run.check.get("rms")?.as_f64()?, run.check.get("max")?.as_f64()?]);
    // Our second run at a packed point has inputs of its own, and keeps its first draw.
    let counts = |run: &RawRun| run.status == RunStatus::Ok && !run.name.ends_with(DENSE);
    let mut sums: Vec<Option<[f64; 2]>> = runs.iter().map(|run| read(run).filter(|_| counts(run))).collect();
    let mut clock = place.clock()?;
    for draw in 1..job.draws {
        let pool = Pool::<T>::of(task, job.seed.wrapping_add(draw as u64), &job.files).context("drawing the inputs")?;
        let expected = Expected::new(task, &pool);
        for (contestant, sum) in place.forwards(&pool)?.iter_mut().zip(&mut sums) {
            let Some([rms, largest]) = sum else { continue };
            let called = contestant.prepare(task).and_then(|()| contestant.call(task));
            clock.wait()?;
            called.map_err(|refusal| anyhow::anyhow!("{} computed it before: {refusal:?}", contestant.name()))?;
            let more = expected.error_of_o(&contestant.outputs()?).context("a forward has an error of O")?;
            *rms += more[0];
            *largest += more[1];
        }
    }
    for (run, sum) in runs.iter_mut().zip(sums).filter(|_| job.draws > 1) {
        for (name, sum) in ["rms", "max"].into_iter().zip(sum.into_iter().flatten()) {
            run.check.insert(name.into(), number(sum / job.draws as f64));
            run.check.insert("draws".into(), job.draws.into());
        }
    }
    Ok(runs)
}

/// The O and the LSE of the first forward that is right, or why there is none.
fn save<T: Float>(
    task: &Task<'_, T>,
    pool: &Pool<T>,
    forwards: &mut [Box<dyn Contestant<T> + '_>],
    clock: &mut dyn Clock,
) -> Result<Result<Outputs<T>, String>> {
    let forward = Point { direction: Direction::Fwd, ..task.point.clone() };
    let task = Task { point: &forward, saved: None, ..*task };
    let expected = Expected::new(&task, pool);
    let mut complaints = Vec::new();
    for contestant in forwards {
        let called = contestant.prepare(&task).and_then(|()| contestant.call(&task));
        clock.wait()?;
        let complaint = match called {
            Err(Refusal::Unsupported(why) | Refusal::Failed(why)) => why,
            Ok(()) => {
                let outputs = contestant.outputs()?;
                match expected.check(&outputs).1 {
                    None => return Ok(Ok(outputs)),
                    Some(wrong) => wrong,
                }
            }
        };
        complaints.push(format!("{}: {complaint}", contestant.name()));
    }
    Ok(Err(format!("no forward gave the O and the LSE that it needs: {}", complaints.join("; "))))
}

/// The run of a library before anything was timed.
fn refused<T>(contestant: &dyn Contestant<T>, status: RunStatus, why: String) -> RawRun {
    RawRun { status, error: Some(why), ..untimed(contestant) }
}

fn untimed<T>(contestant: &dyn Contestant<T>) -> RawRun {
    RawRun {
        name: contestant.name().into(),
        role: contestant.role(),
        status: RunStatus::Ok,
        error: None,
        check: BTreeMap::new(),
        host_us: None,
        ms: vec![],
    }
}

fn run_point<T: Float>(
    entrants: &mut [Entrant<'_, T>],
    clock: &mut dyn Clock,
    iters: usize,
    tell: &mut dyn FnMut(Option<String>) -> Result<()>,
) -> Result<Vec<RawRun>> {
    let (mut runs, mut right) = (Vec::new(), Vec::<(usize, &Expected<'_, T>, Outputs<T>)>::new());
    for (who, Entrant { name, contestant, expected, .. }) in entrants.iter_mut().enumerate() {
        tell(Some(name.clone()))?;
        let task = expected.task();
        let mut run = untimed(&**contestant);
        let called = contestant.prepare(task).and_then(|()| clock.time(&mut || contestant.call(task)));
        // After a failed call too: what it may have left behind is not the next one's.
        clock.wait()?;
        match called {
            Err(Refusal::Unsupported(why)) => run = refused(&**contestant, RunStatus::Unsupported, why),
            Err(Refusal::Failed(why)) => run = refused(&**contestant, RunStatus::Failed, why),
            Ok(()) => {
                let outputs = contestant.outputs()?;
                (run.check, run.error) = expected.check(&outputs);
                let mut others = right.iter().filter(|(_, of, _)| std::ptr::eq(*of, *expected));
                if let Some((.., agreed)) = others.next() {
                    let apart = cross(task, &outputs, agreed, &mut run.check);
                    run.error = run.error.or(apart);
                }
                if run.error.is_some() {
                    run.status = RunStatus::Wrong;
                } else {
                    right.push((who, *expected, outputs));
                }
            }
        }
        runs.push(RawRun { name: name.clone(), ..run });
    }
    if right.is_empty() {
        return Ok(runs);
    }
    tell(None)?;
    let mut host: Vec<Vec<f64>> = vec![Vec::new(); entrants.len()];
    let (firsts, seconds): (Vec<usize>, Vec<usize>) =
        right.iter().map(|(who, ..)| *who).partition(|&who| !entrants[who].second);
    let ours = entrants.iter().position(|entrant| entrant.contestant.role() == Role::Ours);
    for round in 0..WARM_UPS + iters {
        let turns = order(&firsts, ours.zip(seconds.first().copied()), round);
        for &who in &turns {
            let mut took = 0.0;
            let Entrant { name, contestant, expected, .. } = &mut entrants[who];
            let called = clock.time(&mut || {
                let start = Instant::now();
                let called = contestant.call(expected.task());
                took = start.elapsed().as_secs_f64() * 1e6;
                called
            });
            called.map_err(|refusal| anyhow::anyhow!("{name} computed it before: {refusal:?}"))?;
            host[who].push(took);
        }
        let ms = clock.wait()?;
        if round >= WARM_UPS {
            for (who, ms) in turns.into_iter().zip(ms) {
                runs[who].ms.push(ms);
            }
        }
    }
    for (who, expected, before) in right {
        runs[who].host_us = quantile(&host[who][WARM_UPS..], 0.5);
        if let Some(moved) = changed(expected.task(), &before, &entrants[who].contestant.outputs()?) {
            (runs[who].status, runs[who].error) = (RunStatus::Wrong, Some(moved));
        }
    }
    Ok(runs)
}

/// The order of a round, in which each comes first, and right after each other, as often as any: so it is after twice as
/// many rounds as there are libraries (a Williams design). Where ours has a second run (`ours`: the place of the first and
/// of the second), that takes the place of the first in a second lap: both then follow the same neighbours.
/// `peers/sweep.py` says why.
fn order(firsts: &[usize], ours: Option<(usize, usize)>, round: usize) -> Vec<usize> {
    let count = firsts.len();
    let place = |turn: usize| round + if turn % 2 == 1 { turn.div_ceil(2) } else { count - turn / 2 };
    let mut turns: Vec<_> = (0..count).map(|turn| firsts[place(turn) % count]).collect();
    if count > 0 && round / count % 2 == 1 {
        turns.reverse();
    }
    let Some((first, second)) = ours else { return turns };
    turns.extend_from_within(..);
    for who in turns[count..].iter_mut().filter(|who| **who == first) {
        *who = second;
    }
    if !firsts.contains(&first) {
        turns.push(second);
    }
    turns
}

#[cfg(test)]
mod tests;
