//! The kernels' arithmetic of masks on the host, against [`Mask::keep`]: no GPU and no CUDA are needed.
//!
//! `host/visits.cc` includes `common/mask.hpp` and `common/visits.hpp` of the kernels, with small stand-ins for CuTe. It is told
//! what a launch tells the kernels, and which keys each query keeps. So what a plan makes of a mask is compared, too.

use std::fmt::Write as _;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::LazyLock;

use hopper_attention::internal::{Bounds, mask_class};
use hopper_attention::{Corner, DType, Dims, ForwardProblem, Mask, MaskClass};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

/// The program, compiled once. `None`: this machine has no C++ compiler.
static PROGRAM: LazyLock<Option<PathBuf>> = LazyLock::new(|| {
    let host = Path::new(env!("CARGO_MANIFEST_DIR")).join("host");
    let kernels = Path::new(env!("CARGO_MANIFEST_DIR")).join("../crates/hopper-attention-sys/kernels");
    let program = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("visits");
    let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".into());
    let mut command = Command::new(&compiler);
    command.args(["-std=c++17", "-O2", "-I"]).arg(host.join("stubs")).arg("-I").arg(kernels);
    match command.arg(host.join("visits.cc")).arg("-o").arg(&program).output() {
        Ok(output) => {
            assert!(output.status.success(), "{compiler}: {}", String::from_utf8_lossy(&output.stderr));
            Some(program)
        }
        Err(error) => {
            println!("skipped: {compiler}: {error}");
            None
        }
    }
});

/// What a kernel is told of the mask of one sequence.
#[derive(Clone, Copy, Debug)]
struct Told {
    class: MaskClass,
    bounds: Bounds,
    /// The key at which query 0 stands.
    offset: i64,
}

impl Told {
    fn of(problem: &ForwardProblem, seqlen_q: usize, seqlen_kv: usize) -> Self {
        let bounds = Bounds::of(problem);
        // As `band_of_tile` of the kernels (`common/tile_scheduler.hpp`).
        let of_sequence = problem.has_lengths() && problem.mask().corner() == Some(Corner::BottomRight);
        let offset = if of_sequence { seqlen_kv as i64 - seqlen_q as i64 } else { 0 };
        Self { class: mask_class(problem), bounds, offset: i64::from(bounds.diagonal_offset) + offset }
    }

    /// The program's input for these lengths and the mask's definition.
    fn input(&self, mask: Mask, seqlen_q: usize, seqlen_kv: usize) -> String {
        let Bounds { window_left, window_right, step, prefix, .. } = self.bounds;
        let (left, right) = (self.offset - i64::from(window_left), self.offset + i64::from(window_right));
        let (multiplier, shift) = self.bounds.reciprocal();
        let class = self.class as i32;
        let last = prefix - 1;
        let mut text = format!("{class} {seqlen_q} {seqlen_kv} {left} {right} {step} {multiplier} {shift} {last}\n");
        for q in 0..seqlen_q {
            let kept = |&kv: &usize| mask.keep(q, kv, seqlen_q, seqlen_kv);
            let first = (0..seqlen_kv).find(kept).unwrap_or(0);
            let end = (first..seqlen_kv).find(|kv| !kept(kv)).unwrap_or(seqlen_kv);
            assert!(!(end..seqlen_kv).any(|kv| kept(&kv)), "{mask}: the keys of query {q} are no interval");
            write!(text, "{first} {end} ").expect("memory takes all");
        }
        text.push('\n');
        text
    }
}

/// Runs the program: what it prints, and whether it found no difference. `None`: there is no program.
fn run(input: &str) -> Option<(bool, String)> {
    let program = PROGRAM.as_ref()?;
    let mut child = Command::new(program)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap_or_else(|e| panic!("{}: {e}", program.display()));
    // The program ends at the first difference, and then does not read the rest.
    let _ = child.stdin.take().expect("it is piped").write_all(input.as_bytes());
    let output = child.wait_with_output().expect("the program runs");
    Some((output.status.success(), String::from_utf8_lossy(&output.stdout).into_owned()))
}

fn problem(mask: Mask, seqlen_q: usize, seqlen_kv: usize, sequences: Option<usize>) -> ForwardProblem {
    let dims = Dims::new(sequences.unwrap_or(1), seqlen_q, 1, 8).with_seqlen_kv(seqlen_kv);
    let options = ForwardProblem::builder(DType::BF16, dims).mask(mask).packed(sequences.is_some());
    options.build().expect("a legal problem")
}

/// Lengths at which tiles and blocks of every size end, and others.
fn length(random: &mut StdRng) -> usize {
    match random.random_range(0..6) {
        0 => random.random_range(1..8),
        1 => [16, 31, 32, 33, 63, 64, 65, 80, 96, 127, 128, 129, 160, 191, 192, 193, 256][random.random_range(0..17)],
        2 => random.random_range(1..320),
        _ => random.random_range(1..140),
    }
}

fn number(random: &mut StdRng, most: usize) -> usize {
    match random.random_range(0..4) {
        0 => [1, 2, 3, 7, 8, 16, 40, 64, 80, 96, 100, 127, 128, 129][random.random_range(0..14)],
        1 => random.random_range(0..=most + 2),
        2 => random.random_range(0..=most.min(20)),
        _ => usize::MAX >> random.random_range(0..63),
    }
}

fn mask(random: &mut StdRng, most: usize) -> Mask {
    let corner = if random.random() { Corner::TopLeft } else { Corner::BottomRight };
    match random.random_range(0..9) {
        0 => Mask::Full,
        1 => Mask::Causal { corner },
        2 => {
            let mut bound = || random.random::<bool>().then(|| number(random, most));
            Mask::Window { left: bound(), right: bound(), corner }
        }
        3..6 => Mask::Chunked { chunk: number(random, most).max(1), corner },
        _ => Mask::Prefix { keys: number(random, most), corner },
    }
}

#[test]
fn kernels_visit_and_mask_what_a_mask_says() {
    let mut random = StdRng::seed_from_u64(7);
    let mut input = String::new();
    for _ in 0..3000 {
        let (seqlen_q, seqlen_kv) = (length(&mut random), length(&mut random));
        let mask = mask(&mut random, seqlen_q.max(seqlen_kv));
        // By itself, or among packed sequences whose lengths the plan does not know.
        let packed = random.random_range(0..3) == 0;
        let told = if packed {
            let more = |random: &mut StdRng| if random.random() { length(random) } else { 0 };
            let all = problem(mask, seqlen_q + more(&mut random), seqlen_kv + more(&mut random), Some(3));
            Told::of(&all, seqlen_q, seqlen_kv)
        } else {
            Told::of(&problem(mask, seqlen_q, seqlen_kv, None), seqlen_q, seqlen_kv)
        };
        input += &told.input(mask, seqlen_q, seqlen_kv);
    }
    if let Some((right, output)) = run(&input) {
        println!("{output}");
        assert!(right && output.starts_with("3000 problems"), "{output}");
    }
}

/// Every length up to 40, with small tiles: chunks and prefixes at each place of a block.
#[test]
fn chunks_and_prefixes_of_all_small_lengths() {
    let mut input = String::new();
    let mut problems = 0;
    for (seqlen_q, seqlen_kv) in [(1, 40), (40, 1), (17, 17), (24, 40), (40, 24), (33, 34), (48, 16)] {
        for number in 0..=50 {
            for corner in [Corner::BottomRight, Corner::TopLeft] {
                for mask in [Mask::Chunked { chunk: number.max(1), corner }, Mask::Prefix { keys: number, corner }] {
                    let told = Told::of(&problem(mask, seqlen_q, seqlen_kv, None), seqlen_q, seqlen_kv);
                    input += &told.input(mask, seqlen_q, seqlen_kv);
                    problems += 1;
                }
            }
        }
    }
    if let Some((right, output)) = run(&input) {
        assert!(right && output.starts_with(&format!("{problems} problems")), "{output}");
    }
}

/// The program finds numbers that are off by one, each of them.
#[test]
fn edges_that_are_off_by_one_are_found() {
    let chunks = (Mask::chunked(24), 100, 131);
    let prefix = (Mask::prefix(77), 100, 131);
    type Wrong = (&'static str, (Mask, usize, usize), fn(&mut Told));
    let wrong: [Wrong; 10] = [
        ("longer chunks", chunks, |told| told.bounds.step += 1),
        ("shorter chunks", chunks, |told| told.bounds.step -= 1),
        ("chunks that begin late", chunks, |told| told.bounds.window_left -= 1),
        ("chunks that begin early", chunks, |told| told.bounds.window_left += 1),
        ("chunks of a plain window", chunks, |told| told.bounds.step = 1),
        ("chunks by the queries", chunks, |told| told.offset = 0),
        ("chunks with a prefix", chunks, |told| told.bounds.prefix = 50),
        ("a longer prefix", prefix, |told| told.bounds.prefix += 1),
        ("a shorter prefix", prefix, |told| told.bounds.prefix -= 1),
        ("a prefix with a diagonal one later", prefix, |told| told.bounds.window_right += 1),
    ];
    for (what, (mask, seqlen_q, seqlen_kv), spoil) in wrong {
        let mut told = Told::of(&problem(mask, seqlen_q, seqlen_kv, None), seqlen_q, seqlen_kv);
        let of = |told: &Told| run(&told.input(mask, seqlen_q, seqlen_kv));
        if let Some((right, output)) = of(&told) {
            assert!(right, "{mask}: {output}");
        }
        spoil(&mut told);
        if let Some((right, _)) = of(&told) {
            assert!(!right, "{what}: no check failed");
        }
    }
}
