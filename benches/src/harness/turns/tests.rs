use std::cell::RefCell;
use std::collections::BTreeSet;

use super::*;
use crate::harness::Cpu;
use crate::harness::contest::Contestants;
use crate::harness::cpu::{Backend, BackwardBackend, OnCpu, WallClock};
use crate::{Order, Role, Sweep};

/// The CPU backend with something wrong.
struct Broken<'a> {
    inner: Box<dyn Contestant<bf16> + 'a>,
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

    fn prepare(&mut self, task: &Task<'_, bf16>) -> Result<(), Refusal> {
        match self.how {
            "unsupported" => Err(Refusal::Unsupported("no kernel".into())),
            _ => self.inner.prepare(task),
        }
    }

    fn call(&mut self, task: &Task<'_, bf16>) -> Result<(), Refusal> {
        self.calls += 1;
        self.log.borrow_mut().push_str(&self.how[..1]);
        if self.how == "failing" {
            return Err(Refusal::Failed("it broke".into()));
        }
        self.inner.call(task)
    }

    fn outputs(&mut self) -> Result<Outputs<bf16>> {
        let mut outputs = self.inner.outputs()?;
        let last = outputs.tensors.last_mut().expect("a tensor");
        match self.how {
            "wrong" => last[0] = bf16::from_f32(9.0),
            "drifting" if self.calls > 1 => last[0] = bf16::from_f32(last[0].to_f32() + 1.0),
            _ => (),
        }
        Ok(outputs)
    }
}

fn point(direction: Direction) -> Point {
    let sweep = Sweep {
        directions: vec![direction],
        hidden: 128,
        tokens: 64,
        seqlens: vec![32],
        filters: vec!["bf16/d64/causal".into()],
        ..Sweep::small()
    };
    sweep.points().unwrap().remove(0)
}

/// Ours beside broken ones: what is not right is named and the others take turns.
fn turns_of(direction: Direction) -> Vec<RawRun> {
    let point = point(direction);
    let (pool, log) = (Pool::<bf16>::new(&[&point], 1).unwrap(), RefCell::default());
    let ours = || -> Box<dyn Contestant<bf16> + '_> {
        match direction {
            Direction::Fwd => Box::new(OnCpu::<_, Backend>::new(&pool)),
            Direction::Bwd => Box::new(OnCpu::<_, BackwardBackend>::new(&pool)),
        }
    };
    let mut contestants: Contestants<'_, bf16> = vec![ours()];
    for how in ["unsupported", "failing", "wrong", "drifting", "fine"] {
        contestants.push(Box::new(Broken { inner: ours(), how, calls: 0, log: &log }));
    }
    let mut task = Task::new(&point, Order::Bhsd).unwrap();
    let mut clock = WallClock::default();
    let saved = save(&task, &pool, &mut Cpu.forwards(&pool).unwrap(), &mut clock).unwrap().unwrap();
    task.saved = Some(&saved);
    let mut told = Vec::new();
    let expected = Expected::new(&task, &pool);
    let runs = run_point(&mut entrants(&mut contestants, &expected), &mut clock, 4, &mut |event| {
        told.push(event.unwrap_or("timing".into()));
        Ok(())
    });
    drop(contestants);
    assert_eq!(told[1..], ["unsupported", "failing", "wrong", "drifting", "fine", "timing"]);
    let runs = runs.unwrap();
    use RunStatus::{Failed, Unsupported, Wrong};
    let status: Vec<_> = runs.iter().map(|run| (run.status, run.ms.len())).collect();
    assert_eq!(status, [(RunStatus::Ok, 4), (Unsupported, 0), (Failed, 0), (Wrong, 0), (Wrong, 4), (RunStatus::Ok, 4)]);
    assert_eq!(runs[1].error.as_deref(), Some("no kernel"));
    assert!(runs[5].check["cross"].is_f64() && runs[5].host_us > Some(0.0));
    // Once each to be checked, then seven rounds. (The first of the three that are timed logs nothing.)
    assert_eq!(log.into_inner(), "fwdf".to_owned() + "df" + "df" + "fd" + "fd" + "fd" + "df" + "df");
    runs
}

#[test]
fn forwards_take_turns() {
    let runs = turns_of(Direction::Fwd);
    assert!(runs[3].error.as_ref().unwrap().starts_with("row "), "{:?}", runs[3].error);
    assert!(runs[4].error.as_ref().unwrap().ends_with("changed between runs on the same inputs: o"));
}

#[test]
fn backwards_take_turns() {
    let runs = turns_of(Direction::Bwd);
    assert!(runs[3].error.as_ref().unwrap().starts_with("d_v "), "{:?}", runs[3].error);
    assert!(runs[4].error.as_ref().unwrap().ends_with("changed between runs on the same inputs: d_v"));
    for name in ["d_q", "d_k", "d_v"] {
        assert!(runs[0].check[name].as_f64().is_some_and(|error| error < 0.03), "{:?}", runs[0].check);
    }
}

#[test]
fn gradients_need_a_forward_that_is_right() {
    let point = point(Direction::Bwd);
    let (pool, log) = (Pool::<bf16>::new(&[&point], 1).unwrap(), RefCell::default());
    let task = Task::new(&point, Order::Bshd).unwrap();
    let broken = |how| Box::new(Broken { inner: Box::new(OnCpu::<_, Backend>::new(&pool)), how, calls: 0, log: &log });
    let mut forwards: Contestants<'_, bf16> = vec![broken("unsupported"), broken("failing"), broken("wrong")];
    let mut clock = WallClock::default();
    let why = save(&task, &pool, &mut forwards, &mut clock).unwrap().map(|_| ()).unwrap_err();
    let start =
        "no forward gave the O and the LSE that it needs: unsupported: no kernel; failing: it broke; wrong: row ";
    assert!(why.starts_with(start), "{why}");
    forwards.push(broken("fine"));
    let saved = save(&task, &pool, &mut forwards, &mut clock).unwrap().unwrap();
    assert_eq!((saved.tensors.len(), saved.tensors[0].len(), saved.lse.len()), (1, 64 * 128, 64 * 2));
    // A backward that is called without one says so.
    let mut backward = OnCpu::<_, BackwardBackend>::new(&pool);
    let called = backward.prepare(&task).and_then(|()| backward.call(&task));
    assert!(matches!(called, Err(Refusal::Failed(why)) if why == "no forward was run before this backward"));
}

#[test]
fn a_library_follows_each_other_equally_often() {
    for count in 1..8 {
        let all: Vec<_> = (0..count).collect();
        let mut after = vec![vec![0; count]; count];
        for round in 0..2 * count {
            let turns = order(&all, None, round);
            assert_eq!(turns.iter().copied().collect::<BTreeSet<_>>().len(), count);
            turns.windows(2).for_each(|pair| after[pair[0]][pair[1]] += 1);
        }
        for (one, row) in after.iter().enumerate() {
            assert!(
                row.iter().enumerate().all(|(other, &times)| times == if one == other { 0 } else { 2 }),
                "{after:?}"
            );
        }
    }
}

#[test]
fn a_second_run_follows_the_same_neighbours_as_the_first() {
    let orders = |ours| [0, 1, 3].map(|round| order(&[0, 1, 2], ours, round));
    assert_eq!(orders(None), [[0, 1, 2], [1, 2, 0], [2, 1, 0]]);
    assert_eq!(orders(Some((0, 3))), [[0, 1, 2, 3, 1, 2], [1, 2, 0, 1, 2, 3], [2, 1, 0, 2, 1, 3]]);
    assert_eq!(order(&[1, 2], Some((0, 3)), 1), [2, 1, 2, 1, 3], "the first failed");
    assert_eq!(order(&[0], Some((0, 1)), 1), [0, 1]);
}

/// Both passes of packed points on the CPU: ours, the naive computation, and ours on the dense batch.
#[test]
fn packed_points_are_timed_beside_dense_ones() {
    let sweep = Sweep {
        packed: vec![64],
        directions: Direction::ALL.to_vec(),
        hidden: 32,
        dims: vec![16.into()],
        gqa: vec![2],
        tokens: 64,
        seqlens: vec![16],
        masks: ["causal", "window:5"].map(|mask| mask.parse().unwrap()).into(),
        filters: ["bf16/long", "bf16/equal16", "bf16/lognormal8"].map(Into::into).into(),
        ..Sweep::small()
    };
    // With a bias, too: of each sequence, with rows that it hides and NaN where no pair reads; and one that all sequences share.
    for (layout, bias) in
        [(Order::Bshd, "none"), (Order::Bhsd, "none"), (Order::Bshd, "f32:bhq:hidden"), (Order::Bhsd, "bf16:h:hidden")]
    {
        let points = Sweep { bias: bias.parse().unwrap(), ..sweep.clone() }.points().unwrap();
        assert_eq!(points.len(), 12);
        let job = job_of(points.clone(), layout);
        let (mut told, mut done) = (Vec::new(), 0);
        run(&Cpu, &job, &mut |event| {
            match event {
                Event::Library { index: 0, name } => told.push(name),
                Event::Point { index, runs } => {
                    done += 1;
                    for RawRun { name, status, error, ms, check, .. } in &runs {
                        assert_eq!((status, error), (&RunStatus::Ok, &None), "{}: {name}", points[index]);
                        // In two laps, all but ours run twice.
                        assert_eq!(ms.len(), if name == "naive" { 6 } else { 3 });
                        let draws = points[index].direction == Direction::Fwd && !name.ends_with(DENSE);
                        assert_eq!(check.contains_key("draws"), draws, "{name}");
                        assert_eq!(check.contains_key("cross"), name == "naive");
                        let gradient = bias != "none" && points[index].direction == Direction::Bwd;
                        assert_eq!(check.contains_key("d_bias"), gradient, "{name}");
                    }
                }
                _ => (),
            }
            Ok(())
        })
        .unwrap();
        assert_eq!(told, ["hopper-attention", "naive", "hopper-attention-dense"]);
        assert_eq!(done, 12);
    }
}

/// Both passes with a bias beside lists of blocks, which hide NaN of the bias.
#[test]
fn a_bias_is_timed_beside_lists_of_blocks() {
    let sweep = Sweep {
        block_mask: vec![3],
        directions: Direction::ALL.to_vec(),
        hidden: 16,
        dims: vec![8.into()],
        batch: Some(1),
        seqlens: vec![300],
        dtypes: vec![Precision::Bf16],
        ..Sweep::small()
    };
    for bias in ["f32:bhq:hidden", "bf16::hidden"] {
        let points = Sweep { bias: bias.parse().unwrap(), ..sweep.clone() }.points().unwrap();
        let mut done = 0;
        run(&Cpu, &job_of(points.clone(), Order::Bshd), &mut |event| {
            let Event::Point { index, runs } = event else { return Ok(()) };
            done += 1;
            for RawRun { name, status, error, check, .. } in &runs {
                assert_eq!((status, error), (&RunStatus::Ok, &None), "{}: {name}", points[index]);
                assert_eq!(check.contains_key("d_bias"), points[index].direction == Direction::Bwd, "{name}");
            }
            Ok(())
        })
        .unwrap();
        assert_eq!(done, 2);
    }
}

fn job_of(points: Vec<Point>, layout: Order) -> Job {
    Job {
        points,
        iters: 3,
        layout,
        files: vec![],
        seed: 5,
        draws: 2,
        ours: vec![],
        peers: vec![],
        python_peers: false,
        ordinal: 0,
    }
}
