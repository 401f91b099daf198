//! The harness in PyTorch: `peers/sweep.py` in a process of its own, which is started again without the culprit when a
//! library takes the process with it.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead, BufReader, BufWriter, Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, bail};
use serde_json::{Value, json};

use super::{Event, Harness, Job, Sink};

/// The script and what it imports, which travel inside the program.
const SCRIPTS: [(&str, &str); 10] = [
    ("sweep.py", include_str!("../../peers/sweep.py")),
    ("entry.py", include_str!("../../peers/entry.py")),
    ("additive.py", include_str!("../../peers/additive.py")),
    ("backward.py", include_str!("../../peers/backward.py")),
    ("dropout.py", include_str!("../../peers/dropout.py")),
    ("flash3.py", include_str!("../../peers/flash3.py")),
    ("flex.py", include_str!("../../peers/flex.py")),
    ("fp8.py", include_str!("../../peers/fp8.py")),
    ("sdpa.py", include_str!("../../peers/sdpa.py")),
    ("inputs.py", include_str!("../../peers/inputs.py")),
];

/// PyTorch on a GPU, through a Python.
pub struct PyTorch {
    python: PathBuf,
    /// A script in place of ours, for tests.
    script: Option<String>,
}

impl PyTorch {
    /// Through this interpreter.
    pub fn new(python: impl Into<PathBuf>) -> Self {
        Self { python: python.into(), script: None }
    }

    /// With a script in place of ours.
    #[cfg(test)]
    pub(crate) fn with_script(python: &str, script: &str) -> Self {
        Self { script: Some(script.into()), ..Self::new(python) }
    }
}

impl Harness for PyTorch {
    fn name(&self) -> &'static str {
        "pytorch"
    }

    fn run(&mut self, job: &Job, sink: Sink<'_>) -> Result<()> {
        let folder = tempfile::tempdir().context("a folder for the script")?;
        for (name, text) in SCRIPTS {
            let text = self.script.as_deref().filter(|_| name == "sweep.py").unwrap_or(text);
            std::fs::write(folder.path().join(name), text)?;
        }
        let written = write_tensors(job, folder.path())?;
        let mut banned = BTreeMap::new();
        let mut first = 0;
        let mut is_ready = false;
        let sink: Sink<'_> = &mut |event| match event {
            // Of a process that was started again.
            Event::Ready(_) if std::mem::replace(&mut is_ready, true) => Ok(()),
            event => sink(event),
        };
        loop {
            let mut at = At { next: first, ..At::default() };
            let mut task = serde_json::to_value(job)?;
            name_tensors(&mut task, &written);
            task["first"] = first.into();
            task["banned"] = json!(banned);
            let died = self.once(&folder.path().join("sweep.py"), &task, &mut at, sink)?;
            let Some(why) = died else { return Ok(()) };
            // Whoever was computing took the process with it: the others go on without.
            let Some(culprit) = at.library.filter(|name| !banned.contains_key(name)) else { bail!("{why}") };
            let place = job.points.get(at.next).map_or_else(String::new, |point| format!(" at {point}"));
            banned.insert(culprit, format!("it ended the process{place}: {why}"));
            first = at.next;
        }
    }
}

/// Writes the tensors of files as f32, `[batch, seqlen, heads, head_dim]`. Gives their paths and shapes, by file and name.
fn write_tensors(job: &Job, folder: &Path) -> Result<BTreeMap<String, Value>> {
    let mut written = BTreeMap::<String, Value>::new();
    for (place, file) in job.files.iter().enumerate() {
        for (name, tensor) in file.tensors() {
            let path = folder.join(format!("tensor{place}.{name}"));
            let mut to = BufWriter::new(File::create(&path)?);
            tensor.values().iter().try_for_each(|value| to.write_all(&value.to_le_bytes()))?;
            to.flush()?;
            written.entry(file.file.name.clone()).or_default()[name] = json!({"path": path, "shape": tensor.shape()});
        }
    }
    Ok(written)
}

/// Says in the points of a task where the tensors of their files are.
fn name_tensors(task: &mut Value, written: &BTreeMap<String, Value>) {
    for point in task["points"].as_array_mut().into_iter().flatten() {
        let tensors = point["file"]["name"].as_str().and_then(|name| written.get(name)).cloned();
        if let Some(tensors) = tensors {
            point["file"]["tensors"] = tensors;
        }
    }
}

/// How far a process got.
#[derive(Default)]
struct At {
    /// The point that is not done.
    next: usize,
    /// The library that is computing it for the first time.
    library: Option<String>,
}

impl PyTorch {
    /// One process from its start to its end; why it died, if it did.
    fn once(&self, script: &Path, task: &Value, at: &mut At, sink: Sink<'_>) -> Result<Option<String>> {
        let spawned = Command::new(&self.python)
            .arg(script)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn();
        let mut child = match spawned {
            Ok(child) => child,
            Err(error) => {
                sink(Event::Absent { error: format!("{} does not start: {error}", self.python.display()) })?;
                return Ok(None);
            }
        };
        let (mut stdin, stdout, mut stderr) = match (child.stdin.take(), child.stdout.take(), child.stderr.take()) {
            (Some(stdin), Some(stdout), Some(stderr)) => (stdin, stdout, stderr),
            _ => bail!("the script's pipes are missing"),
        };
        // What it says is kept for the case that it dies: on a terminal it would break the progress bar.
        let said = std::thread::Builder::new().spawn(move || {
            let mut said = Vec::new();
            let _ = stderr.read_to_end(&mut said);
            String::from_utf8_lossy(&said).into_owned()
        })?;
        // A script that dies before it has read its task says why itself.
        let _ = stdin.write_all(task.to_string().as_bytes());
        drop(stdin);
        let heard = listen(BufReader::new(stdout), at, sink);
        if heard.is_err() {
            // Its events are no longer read: without this it would block on a full pipe.
            let _ = child.kill();
        }
        let status = child.wait()?;
        let said = said.join().unwrap_or_default();
        heard?;
        if status.success() {
            return Ok(None);
        }
        let tail: Vec<&str> = said.lines().map(str::trim).filter(|line| !line.is_empty()).rev().take(2).collect();
        Ok(Some(format!("{status}; it said: {}", tail.into_iter().rev().collect::<Vec<_>>().join(" / "))))
    }
}

fn listen(lines: impl BufRead, at: &mut At, sink: Sink<'_>) -> Result<()> {
    for line in lines.lines() {
        let line = line?;
        let event: Event = serde_json::from_str(&line).with_context(|| format!("an event of the script: {line}"))?;
        match &event {
            Event::Library { name, .. } => at.library = Some(name.clone()),
            // The timings of all libraries alternate, so a crash cannot be put down to one of them.
            Event::Timing { .. } => at.library = None,
            Event::Point { index, .. } => (at.next, at.library) = (index + 1, None),
            _ => (),
        }
        sink(event)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::{Order, RunStatus, Sweep};

    fn job() -> Job {
        let sweep = Sweep { filters: vec!["bf16/d64".into()], ..Sweep::small() };
        Job {
            points: sweep.points().unwrap(),
            iters: 12,
            layout: Order::Bshd,
            files: vec![],
            seed: 1,
            draws: 1,
            ours: vec![],
            peers: vec![],
            python_peers: true,
            ordinal: 0,
        }
    }

    fn events(script: Option<&str>, python: &str) -> (Result<()>, Vec<Event>) {
        let mut told = Vec::new();
        let mut harness = PyTorch { script: script.map(Into::into), ..PyTorch::new(python) };
        let ended = harness.run(&job(), &mut |event| {
            told.push(event);
            Ok(())
        });
        (ended, told)
    }

    #[test]
    fn a_python_that_is_not_there_is_told() {
        let (ended, told) = events(None, "python-that-is-missing");
        assert!(
            ended.is_ok() && matches!(&told[..], [Event::Absent { error }] if error.contains("does not start")),
            "{told:?}"
        );
    }

    /// Six points; `b` dies at the second and stays out of the rest.
    const DYING: &str = r#"
import json, os, sys
job = json.load(sys.stdin)
tell = lambda event, **fields: print(json.dumps({"event": event, **fields}), flush=True)
for index in range(job["first"], len(job["points"])):
    runs = []
    for name in ("a", "b"):
        run = {"name": name, "role": "peer", "status": "ok", "ms": [1.0]}
        if name in job["banned"]:
            run = {"name": name, "role": "peer", "status": "failed", "error": job["banned"][name]}
        else:
            tell("library", index=index, name=name)
            if name == "b" and index == 1:
                print("out of luck", file=sys.stderr, flush=True)
                os._exit(7)
        runs.append(run)
    tell("point", index=index, runs=runs)
"#;

    #[test]
    fn who_ends_the_process_is_named_and_the_others_go_on() {
        let (ended, told) = events(Some(DYING), "python3");
        ended.unwrap();
        let points: Vec<_> = told
            .iter()
            .filter_map(|event| if let Event::Point { index, runs } = event { Some((*index, runs)) } else { None })
            .collect();
        assert_eq!(points.iter().map(|(index, _)| *index).collect::<Vec<_>>(), [0, 1, 2, 3, 4, 5]);
        assert_eq!(points[0].1[1].status, RunStatus::Ok);
        for (_, runs) in &points[1..] {
            assert_eq!((runs[0].status, runs[1].status), (RunStatus::Ok, RunStatus::Failed));
            let why = runs[1].error.as_ref().unwrap();
            assert!(
                why.contains("at fwd/bf16/d64/full/s128") && why.contains("exit status: 7; it said: out of luck"),
                "{why}"
            );
        }
    }

    /// Says in its first event what it found of the tensors of a point's file.
    const READING: &str = r#"
import array, json, sys
job = json.load(sys.stdin)
found = []
for point in job["points"]:
    assert point["file"]["sequences"] == 2 and point["file"]["scale"] == 0.5, point
    for name, tensor in sorted(point["file"]["tensors"].items()):
        numbers = array.array("f")
        with open(tensor["path"], "rb") as file:
            numbers.frombytes(file.read())
        found.append([name, tensor["shape"], len(numbers), sum(numbers)])
print(json.dumps({"event": "absent", "error": json.dumps(found)}))
"#;

    #[test]
    fn tensors_of_files_reach_the_script() {
        let files = vec![Arc::new(crate::files::tests::tensors("a"))];
        let sweep = Sweep { filters: vec!["bf16/full".into()], ..Sweep::small() };
        let job = Job { points: sweep.points_of(&files).unwrap(), files: files.clone(), ..job() };
        let mut told = Vec::new();
        let ended = PyTorch::with_script("python3", READING).run(&job, &mut |event| {
            told.push(event);
            Ok(())
        });
        ended.unwrap();
        let expected = files[0].tensors().map(|(name, tensor)| {
            let sum = tensor.values().iter().map(|&x| f64::from(x)).sum::<f64>();
            json!([name, tensor.shape(), tensor.values().len(), sum])
        });
        let mut expected: Vec<Value> = expected.collect();
        expected.sort_by_key(|tensor| tensor[0].to_string());
        let [Event::Absent { error }] = &told[..] else { panic!("{told:?}") };
        assert_eq!(serde_json::from_str::<Vec<Value>>(error).unwrap(), expected);
    }

    #[test]
    fn a_script_that_dies_without_a_culprit_is_an_error() {
        let (ended, told) = events(Some("import sys\nsys.exit('no luck at all')"), "python3");
        assert!(told.is_empty() && ended.unwrap_err().to_string().ends_with("it said: no luck at all"));
        let (ended, _) = events(Some("print('{}')"), "python3");
        assert!(format!("{:#}", ended.unwrap_err()).starts_with("an event of the script: {}"));
    }
}
