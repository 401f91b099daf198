//! What the tests of the binary share: running it, and making files for it.
#![allow(dead_code, reason = "each test binary uses a part of it")]

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};

/// Queries, keys and values of a real transformer layer: bf16 [2, 197, 12, 32], layout in the metadata.
pub const FIXTURE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fixtures/minilm_layer3.safetensors");

/// The same file where tests run that were built elsewhere (see [`place`]).
pub fn fixture() -> PathBuf {
    place(FIXTURE)
}

/// A file at its place in the build, or of the same name in the folder that `scripts/gpu_test.sh` carried to a GPU.
fn place(built: &str) -> PathBuf {
    match (std::env::var_os("HATTN_TEST_PACK"), Path::new(built).file_name()) {
        (Some(pack), Some(name)) => Path::new(&pack).join(name),
        _ => built.into(),
    }
}

/// The binary.
pub fn program() -> PathBuf {
    place(env!("CARGO_BIN_EXE_hattn"))
}

fn command() -> Command {
    Command::new(program())
}

/// What a run of the binary gave.
#[derive(Debug)]
pub struct Ran {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

impl Ran {
    pub fn of(command: &mut Command) -> Self {
        let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
        let output = ended(child.expect("the binary starts"));
        let text = |bytes| String::from_utf8(bytes).expect("the binary prints UTF-8");
        Self { code: output.status.code(), stdout: text(output.stdout), stderr: text(output.stderr) }
    }

    /// The run succeeded without a word on stderr; gives what it printed.
    #[track_caller]
    pub fn fine(self) -> String {
        assert_eq!((self.code, self.stderr.as_str()), (Some(0), ""), "stdout: {}", self.stdout);
        self.stdout
    }

    /// The run succeeded and warned; gives the warnings.
    #[track_caller]
    pub fn warned(self) -> String {
        assert_eq!(self.code, Some(0), "{self:?}");
        assert!(self.stderr.lines().all(|line| line.starts_with("hattn: warning: ")), "{self:?}");
        assert!(!self.stderr.is_empty(), "no warning");
        self.stderr
    }

    /// The run was refused with exit code 1, nothing on stdout, and one sentence that holds every one of `parts`.
    #[track_caller]
    pub fn refused(self, parts: &[&str]) {
        assert_eq!((self.code, self.stdout.as_str()), (Some(1), ""), "stderr: {}", self.stderr);
        assert_eq!(self.stderr.lines().count(), 1, "not one sentence: {}", self.stderr);
        assert!(self.stderr.starts_with("hattn: "), "{}", self.stderr);
        for part in parts {
            assert!(self.stderr.contains(part), "`{part}` is not in: {}", self.stderr);
        }
    }
}

/// What a run gave once it has ended. One that takes minutes hangs, and is ended here.
#[track_caller]
pub fn ended(child: Child) -> Output {
    let id = child.id().to_string();
    let (tell, told) = std::sync::mpsc::channel();
    std::thread::spawn(move || tell.send(child.wait_with_output()));
    told.recv_timeout(Duration::from_secs(120))
        .unwrap_or_else(|_| {
            let _ = Command::new("kill").args(["-KILL", &id]).status();
            panic!("hattn hangs");
        })
        .expect("its output can be read")
}

/// Waits until something holds, a minute at most.
#[track_caller]
pub fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < Duration::from_secs(60), "waited too long until {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Sends a signal, by its name without SIG.
pub fn send(signal: &str, process: &Child) {
    let sent = Command::new("kill").args([format!("-{signal}"), process.id().to_string()]).status();
    assert!(sent.expect("kill starts").success());
}

/// Runs `hattn` with these arguments.
pub fn hattn<I: IntoIterator<Item = S>, S: AsRef<std::ffi::OsStr>>(args: I) -> Ran {
    Ran::of(command().args(args))
}

/// Runs `hattn` with the words of a line, and then with paths after `--input` and `--output`.
pub fn hattn_on(line: &str, input: &Path, output: Option<&Path>) -> Ran {
    let mut command = command();
    command.args(line.split_whitespace()).arg("--input").arg(input);
    if let Some(output) = output {
        command.arg("--output").arg(output);
    }
    Ran::of(&mut command)
}

/// Shapes at the edges: one query, the file's other layout, nothing at all.
pub const EDGES: [&str; 5] = [
    "--batch 1 --seqlen-q 1 --heads-q 1 --head-dim 8 --dtype f16",
    "--batch 1 --seqlen-q 130 --seqlen-kv 65 --heads-q 4 --heads-kv 1 --head-dim 128 --layout bhsd",
    "--batch 0 --seqlen-q 5 --heads-q 2 --head-dim 16",
    "--batch 1 --seqlen-q 0 --seqlen-kv 5 --heads-q 2 --head-dim 16",
    "--batch 1 --seqlen-q 5 --seqlen-kv 0 --heads-q 2 --head-dim 16",
];

/// `check` passes on the CPU for these shapes and those at the edges, with each of the options.
#[track_caller]
pub fn check_passes(shapes: &[&str], options: &[String]) {
    let folder = Folder::new();
    for shape in EDGES.iter().chain(shapes) {
        let input = folder.random("qkv.safetensors", shape);
        for options in options {
            let text = hattn_on(&format!("check --device cpu {options}"), &input, None).fine();
            assert!(text.contains("passed"), "{shape} {options}: {text}");
        }
    }
}

/// A folder that goes away with the value.
pub struct Folder(tempfile::TempDir);

impl Folder {
    pub fn new() -> Self {
        Self(tempfile::tempdir().expect("a temporary folder"))
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// The names of what is in it, sorted.
    pub fn names(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.0.path()).expect("a folder");
        let mut names: Vec<String> =
            entries.map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        names
    }

    /// Writes a file with `hattn random` and the words of a line.
    #[track_caller]
    pub fn random(&self, name: &str, line: &str) -> PathBuf {
        let path = self.path(name);
        Ran::of(command().arg("random").args(line.split_whitespace()).arg("--output").arg(&path)).fine();
        path
    }

    /// Writes a safetensors file of f32 tensors whose elements are small and differ.
    pub fn tensors(&self, name: &str, layout: Option<&str>, tensors: &[(&str, &[usize])]) -> PathBuf {
        let value = |i: usize| ((i * 7919 % 1009) as f32 - 504.0) / 256.0;
        let values: Vec<Vec<f32>> =
            tensors.iter().map(|(_, shape)| (0..shape.iter().product()).map(value).collect()).collect();
        let tensors: Vec<(&str, Dtype, &[usize], Vec<u8>)> =
            tensors.iter().zip(&values).map(|((name, shape), v)| (*name, Dtype::F32, *shape, bytes(v))).collect();
        self.typed(name, layout, &tensors)
    }

    /// Writes a safetensors file with these bytes.
    pub fn typed(&self, name: &str, layout: Option<&str>, tensors: &[(&str, Dtype, &[usize], Vec<u8>)]) -> PathBuf {
        let path = self.path(name);
        let views = tensors.iter().map(|(name, dtype, shape, data)| {
            (*name, TensorView::new(*dtype, shape.to_vec(), data).expect("a tensor whose bytes fit its shape"))
        });
        let metadata = layout.map(|layout| HashMap::from([("layout".to_string(), layout.to_string())]));
        let file = safetensors::serialize(views, metadata).expect("tensors that can be written");
        std::fs::write(&path, file).expect("a file that can be written");
        path
    }
}

/// A safetensors file with this header, whatever it says, and then these bytes.
pub fn with_header(header: &[u8], tensors: &[u8]) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes()[..], header, tensors].concat()
}

/// Little-endian bytes of f32.
pub fn bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

/// What `hattn run` wrote.
pub struct Written {
    pub dtype: Dtype,
    pub o_shape: Vec<usize>,
    pub o: Vec<f32>,
    pub lse_shape: Vec<usize>,
    pub lse: Vec<f32>,
    /// By name, with their shapes: of `--backward`, and max_logits.
    pub gradients: HashMap<String, (Vec<usize>, Vec<f32>)>,
    pub metadata: HashMap<String, String>,
}

impl Written {
    /// Reads a file with the safetensors crate's own reader.
    pub fn read(path: &Path) -> Self {
        let file = std::fs::read(path).expect("an output");
        let (_, header) = SafeTensors::read_metadata(&file).expect("a safetensors header");
        let tensors = SafeTensors::deserialize(&file).expect("a safetensors file");
        let (o, lse) = (tensors.tensor("o").expect("o"), tensors.tensor("lse").expect("lse"));
        assert_eq!(lse.dtype(), Dtype::F32);
        let others = tensors.tensors().into_iter().filter(|(name, _)| name != "o" && name != "lse");
        let gradients: HashMap<_, _> = others
            .map(|(name, tensor)| {
                assert_eq!(tensor.dtype(), o.dtype(), "{name}");
                (name, (tensor.shape().to_vec(), floats(o.dtype(), tensor.data())))
            })
            .collect();
        let names = gradients.keys().map(String::as_str);
        let mut names: Vec<&str> = names.filter(|&name| !["max_logits", "dbias"].contains(&name)).collect();
        names.sort_unstable();
        assert!(names.is_empty() || names == ["d_k", "d_q", "d_v"], "tensors other than gradients: {names:?}");
        Self {
            dtype: o.dtype(),
            o_shape: o.shape().to_vec(),
            o: floats(o.dtype(), o.data()),
            lse_shape: lse.shape().to_vec(),
            lse: floats(Dtype::F32, lse.data()),
            gradients,
            metadata: header.metadata().clone().unwrap_or_default(),
        }
    }
}

fn floats(dtype: Dtype, data: &[u8]) -> Vec<f32> {
    let halves = |to: fn(u16) -> f32| data.chunks_exact(2).map(|b| to(u16::from_le_bytes([b[0], b[1]]))).collect();
    match dtype {
        Dtype::BF16 => halves(|bits| half::bf16::from_bits(bits).to_f32()),
        Dtype::F16 => halves(|bits| half::f16::from_bits(bits).to_f32()),
        Dtype::F32 => data.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect(),
        other => panic!("output of dtype {other}"),
    }
}
