//! The JSON of a sweep: everything that was measured, and what has to be known to read it later.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::card::CardState;
use crate::host::HostCost;
use crate::stats::measured;
use crate::{DENSE, Point, Summary, distinct, quantile, text};

/// The schema's name and version; it changes when a field changes its meaning or goes.
pub const SCHEMA: &str = "hattn-bench/1";

/// How the note of a sweep that broke off begins.
pub(crate) const STOPPED: &str = "THE SWEEP STOPPED";

/// A whole sweep.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Report {
    /// [`SCHEMA`].
    pub schema: String,
    /// The commit that was measured. `None` where it was not given.
    pub commit: Option<String>,
    /// When, as RFC 3339 in UTC.
    pub date: String,
    /// The device's name.
    pub device: String,
    /// The driver's version; none on a CPU.
    pub driver: Option<String>,
    /// Who timed: `pytorch`, `rust` or `cpu`.
    pub harness: String,
    /// Versions of what took part.
    pub versions: BTreeMap<String, Value>,
    /// How the timings were taken, in words.
    pub method: String,
    /// The options, given or defaulted.
    pub options: BTreeMap<String, Value>,
    /// What took part.
    pub libraries: Vec<Library>,
    /// What should have taken part and could not, with the reason.
    pub missing: Vec<Missing>,
    /// What a reader must know besides.
    pub notes: Vec<String>,
    /// The card before the first timing.
    pub state_before: Option<CardState>,
    /// The card after the last.
    pub state_after: Option<CardState>,
    /// What the card reaches.
    pub ceilings: Vec<Ceiling>,
    /// What the calls cost on the host.
    pub host: Option<HostCost>,
    /// The points, in the order measured.
    pub points: Vec<PointReport>,
}

/// A library that took part.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Library {
    /// Its name in the runs.
    pub name: String,
    /// Ours or a peer's.
    pub role: Role,
    /// The file or the package that it came from.
    pub file: String,
    /// The file's hash.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sha256: Option<String>,
    /// The package's version.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
}

/// A library that could not take part.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Missing {
    /// Its name, or its file's.
    pub name: String,
    /// Ours or a peer's.
    pub role: Role,
    /// Why.
    pub error: String,
}

/// A rate that the card reaches, measured as the points are.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Ceiling {
    /// `product_bf16`, `product_f16`, `product_e4m3` (a matrix product of 8192 x 8192 x 8192) or `copy` (of 1 GiB).
    pub what: String,
    /// `before` or `after` the points.
    pub when: String,
    /// 10^12 operations, or bytes read and written, a second at the median.
    pub tera_per_s: f64,
    /// Every timing, in milliseconds.
    pub ms: Vec<f64>,
}

/// One point of a sweep.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PointReport {
    /// The sizes.
    pub point: Point,
    /// The operations that rates are made of, see [`Point::flops`].
    pub flops: u64,
    /// The fewest bytes that must be moved, see [`Point::bytes`].
    pub bytes: u64,
    /// One run a library.
    pub runs: Vec<Run>,
    /// What the card did meanwhile.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub busy: Option<Busy>,
}

/// The card while a point was timed, from samples a few milliseconds apart.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Busy {
    /// How many samples.
    pub samples: usize,
    /// Lowest, median and highest SM clock, in MHz.
    pub sm_mhz: Option<[f64; 3]>,
    /// Lowest, median and highest power, in watts, as the driver averages it.
    pub power_w: Option<[f64; 3]>,
    /// The highest temperature.
    pub celsius: Option<f64>,
    /// Every throttle reason seen.
    pub reasons: BTreeSet<String>,
}

impl Busy {
    /// Of samples; none of nothing.
    pub fn new(states: &[CardState]) -> Option<Self> {
        let spread = |value: fn(&CardState) -> Option<f64>| {
            let values: Vec<f64> = states.iter().filter_map(value).collect();
            Some([quantile(&values, 0.0)?, quantile(&values, 0.5)?, quantile(&values, 1.0)?])
        };
        (!states.is_empty()).then(|| Self {
            samples: states.len(),
            sm_mhz: spread(|s| s.sm_mhz),
            power_w: spread(|s| s.power_w),
            celsius: spread(|s| s.celsius).map(|[.., most]| most),
            reasons: states.iter().flat_map(|s| s.reasons.iter().cloned()).collect(),
        })
    }
}

/// Whether a library is ours or a peer's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Ours.
    Ours,
    /// Another one.
    Peer,
}

/// How a run ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RunStatus {
    /// Right, and timed.
    Ok,
    /// The output is wrong, or changed between runs on the same inputs; a timing, where there is one, does not count.
    Wrong,
    /// There is no kernel for the point.
    Unsupported,
    /// The call failed.
    Failed,
}

/// One library at one point.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Run {
    /// The library.
    pub name: String,
    /// Ours or a peer's.
    pub role: Role,
    /// How it ended.
    pub status: RunStatus,
    /// Why, unless it is [`RunStatus::Ok`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Errors found before the timing, by name; a NaN is text.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub check: BTreeMap<String, Value>,
    /// The median time of the call on the host, in microseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_us: Option<f64>,
    /// The timings; none unless it was timed.
    #[serde(flatten)]
    pub summary: Option<Summary>,
}

impl Run {
    /// TFLOP/s that count: none of a wrong output.
    pub fn rate(&self) -> Option<f64> {
        self.summary.as_ref().filter(|_| self.status == RunStatus::Ok).map(|s| s.tflops)
    }

    /// The relative RMSE of O against f64 and its largest error, on some rows: the mean of the draws. `None` of gradients, of a
    /// wrong output and of older records.
    pub fn error_of_o(&self) -> Option<[f64; 2]> {
        let number = |name| self.check.get(name).and_then(Value::as_f64);
        Some([number("rms")?, number("max")?]).filter(|_| self.status == RunStatus::Ok)
    }
}

impl PointReport {
    /// Our error of O, RMSE and largest, over that of a run. `None` where the other is exact.
    pub fn error_ratio(&self, to: Option<&Run>) -> Option<[f64; 2]> {
        let (ours, theirs) = (self.ours()?.error_of_o()?, to?.error_of_o()?);
        Some([ours[0] / theirs[0], ours[1] / theirs[1]]).filter(|ratios| ratios.iter().all(|ratio| ratio.is_finite()))
    }

    /// A library's run.
    pub fn run(&self, name: &str) -> Option<&Run> {
        self.runs.iter().find(|run| run.name == name)
    }

    /// A peer's run.
    pub fn peer(&self, name: &str) -> Option<&Run> {
        self.run(name).filter(|run| run.role == Role::Peer)
    }

    /// The first run of ours: the others are variants.
    pub fn ours(&self) -> Option<&Run> {
        self.runs.iter().find(|run| run.role == Role::Ours)
    }

    /// The fastest peer that counts.
    pub fn best_peer(&self) -> Option<&Run> {
        let peers = self.runs.iter().filter(|run| run.role == Role::Peer && run.rate().is_some());
        peers.max_by(|a, b| a.rate().unwrap_or(0.0).total_cmp(&b.rate().unwrap_or(0.0)))
    }

    /// Our second run, on the dense batch of a packed point.
    pub fn dense(&self) -> Option<&Run> {
        self.runs.iter().find(|run| run.role == Role::Ours && run.name.ends_with(DENSE))
    }

    /// What a reader asks of a variant: its rate over ours. Of our second run at packed points the other way round,
    /// since it is what packing is held against.
    pub fn variant_ratio(&self, name: &str) -> Option<f64> {
        let ratio = self.ratio(self.run(name))?;
        Some(if name.ends_with(DENSE) { ratio } else { 1.0 / ratio })
    }

    /// Our rate over that of a run.
    pub fn ratio(&self, to: Option<&Run>) -> Option<f64> {
        Some(self.ours()?.rate()? / to?.rate()?)
    }
}

impl Report {
    /// The note of a sweep that broke off.
    pub fn stopped(&self) -> Option<&str> {
        self.notes.iter().map(String::as_str).find(|note| note.starts_with(STOPPED))
    }

    /// The best rate measured of a ceiling, in 10^12 a second.
    pub fn ceiling(&self, what: &str) -> Option<f64> {
        let rates = self.ceilings.iter().filter(|c| c.what == what).map(|c| c.tera_per_s);
        rates.max_by(f64::total_cmp)
    }

    /// TFLOP/s at which a point meets a ceiling: that of its products or that of its bytes, whichever comes first.
    pub fn roofline(&self, point: &Point) -> Option<f64> {
        let product = self.ceiling(&format!("product_{}", point.dtype))?;
        let copy = self.ceiling("copy")?;
        Some(product.min(copy * point.flops() as f64 / point.bytes() as f64))
    }

    /// The classes of inputs and the files of inputs, in the order of the points.
    pub fn inputs(&self) -> Vec<&str> {
        distinct(self.points.iter().map(|p| p.point.inputs_name()))
    }

    /// The names of the libraries in the order of the columns: ours first.
    pub fn names(&self) -> Vec<&str> {
        let mut names: Vec<(Role, &str)> = Vec::new();
        for run in self.points.iter().flat_map(|p| &p.runs) {
            if !names.iter().any(|(_, name)| *name == run.name) {
                names.push((run.role, &run.name));
            }
        }
        names.sort_by_key(|(role, _)| *role == Role::Peer);
        names.into_iter().map(|(_, name)| name).collect()
    }

    /// The names of ours that are in no ratio to peers: other builds, and other factors of e4m3 operands.
    pub fn variants(&self) -> Vec<&str> {
        let varies = |p: &PointReport, name: &str| {
            p.run(name).is_some_and(|run| run.role == Role::Ours) && p.ours().is_some_and(|ours| ours.name != name)
        };
        self.names().into_iter().filter(|name| self.points.iter().any(|p| varies(p, name))).collect()
    }

    /// Reads a report.
    ///
    /// # Errors
    /// When the file cannot be read, has another schema, or holds a number that no measurement gives.
    pub fn load(path: &Path) -> Result<Self> {
        let load = || {
            let value: Value = serde_json::from_str(&text::read(path)?)?;
            let schema = value["schema"].as_str().unwrap_or("none");
            ensure!(schema == SCHEMA, "its schema is {schema}; allowed: {SCHEMA}");
            let report: Self = serde_json::from_value(value)?;
            report.check()?;
            Ok(report)
        };
        load().with_context(|| format!("report {}", path.display()))
    }

    /// Whether everything that is divided by, multiplied or drawn is such that this can be done.
    fn check(&self) -> Result<()> {
        for PointReport { point, runs, .. } in &self.points {
            point.check().with_context(|| format!("the point {point}"))?;
            for run in runs {
                let checked = run.summary.as_ref().map_or(Ok(()), Summary::check);
                checked.with_context(|| format!("{} at {point}", run.name))?;
            }
        }
        for Ceiling { what, tera_per_s, .. } in &self.ceilings {
            measured("tera_per_s", *tera_per_s).with_context(|| format!("ceiling {what}"))?;
        }
        Ok(())
    }

    /// The JSON, a point a line, so that a change of a few points is a change of a few lines.
    ///
    /// # Errors
    /// When a number is no JSON; none that is measured is.
    pub fn json(&self) -> Result<String> {
        let mut text = String::from("{\n");
        let Value::Object(fields) = serde_json::to_value(Self { points: vec![], ..self.clone() })? else {
            anyhow::bail!("a report is an object");
        };
        // The order of the struct, which a reader can follow; `Value` sorts by name.
        const FIELDS: [&str; 16] = [
            "schema",
            "commit",
            "date",
            "device",
            "driver",
            "harness",
            "versions",
            "method",
            "options",
            "libraries",
            "missing",
            "notes",
            "state_before",
            "state_after",
            "ceilings",
            "host",
        ];
        for name in FIELDS {
            let value = fields.get(name).with_context(|| format!("a report has {name}"))?;
            text += &format!(" {}: ", serde_json::to_string(name)?);
            match value {
                Value::Array(items) if !items.is_empty() => text += &lines(items)?,
                other => text += &serde_json::to_string(other)?,
            }
            text += ",\n";
        }
        text += &format!(" \"points\": {}\n}}\n", lines(&self.points)?);
        Ok(text)
    }
}

/// An array, an item a line.
fn lines<T: Serialize>(items: &[T]) -> Result<String> {
    let items = items.iter().map(|item| Ok(format!("  {}", serde_json::to_string(item)?)));
    Ok(format!("[\n{}\n ]", items.collect::<Result<Vec<_>>>()?.join(",\n")))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::{Precision, Sweep};

    /// A report of two lengths: ours at 600 and 500 TFLOP/s, a peer at 500 and 500, another without an answer.
    pub(crate) fn report() -> Report {
        let sweep = Sweep {
            dtypes: vec![Precision::Bf16],
            dims: vec![64.into()],
            masks: vec![crate::PointMask::Causal],
            seqlens: vec![512, 1024],
            ..Sweep::papers()
        };
        let run = |point: &Point, name: &str, role, rate: Option<f64>| Run {
            name: name.into(),
            role,
            status: if rate.is_some() { RunStatus::Ok } else { RunStatus::Unsupported },
            error: rate.is_none().then(|| "no kernel".into()),
            check: BTreeMap::new(),
            host_us: rate.map(|_| 4.5),
            summary: rate.and_then(|rate| {
                let ms = point.flops() as f64 / rate * 1e-9;
                Summary::new([0.98, 0.99, 1.0, 1.01, 1.02].map(|x| x * ms).into(), point.flops())
            }),
        };
        let points = sweep.points().unwrap().into_iter().zip([600.0, 500.0]).map(|(point, ours)| PointReport {
            flops: point.flops(),
            bytes: point.bytes(),
            runs: vec![
                run(&point, "fa3", Role::Peer, Some(500.0)),
                run(&point, "ours", Role::Ours, Some(ours)),
                run(&point, "none", Role::Peer, None),
            ],
            busy: None,
            point,
        });
        let ceiling = |what: &str, when: &str, rate: f64| Ceiling {
            what: what.into(),
            when: when.into(),
            tera_per_s: rate,
            ms: vec![1.0],
        };
        Report {
            schema: SCHEMA.into(),
            commit: Some("abc".into()),
            date: "2026-01-02T03:04:05Z".into(),
            device: "NVIDIA H100 80GB HBM3".into(),
            driver: Some("580.1".into()),
            harness: "pytorch".into(),
            versions: BTreeMap::from([("torch".into(), "2.11".into())]),
            method: "CUDA events".into(),
            options: BTreeMap::new(),
            libraries: vec![],
            missing: vec![Missing { name: "fa4".into(), role: Role::Peer, error: "no module".into() }],
            notes: vec![],
            state_before: None,
            state_after: None,
            ceilings: vec![
                ceiling("product_bf16", "before", 790.0),
                ceiling("product_bf16", "after", 760.0),
                ceiling("copy", "before", 3.0),
            ],
            host: None,
            points: points.collect(),
        }
    }

    #[test]
    fn json_has_the_names_that_readers_rely_on() {
        let json: Value = serde_json::from_str(&report().json().unwrap()).unwrap();
        assert_eq!(json["schema"], SCHEMA);
        let point = &json["points"][0];
        assert_eq!(point["point"]["seqlen"], 512);
        assert_eq!((&point["point"]["direction"], &point["point"]["dtype"]), (&"fwd".into(), &"bf16".into()));
        assert_eq!(point["flops"], 4 * 512 * 512 * 64 * 32 * 32_u64 / 2);
        let timed = &point["runs"][1];
        assert_eq!((&timed["role"], &timed["status"]), (&"ours".into(), &"ok".into()));
        assert_eq!(timed["ms"].as_array().unwrap().len(), 5);
        for key in ["median_ms", "q1_ms", "q3_ms", "iqr_percent", "tflops", "host_us"] {
            assert!(timed[key].is_f64(), "{key}: {timed}");
        }
        assert!(timed.get("error").is_none());
        assert_eq!(point["runs"][2]["error"], "no kernel");
        assert!(point["runs"][2].get("ms").is_none());
    }

    #[test]
    fn json_comes_back_as_it_went_a_point_a_line() {
        let text = report().json().unwrap();
        assert_eq!(serde_json::from_str::<Report>(&text).unwrap(), report());
        assert_eq!(text.lines().filter(|line| line.contains("\"flops\"")).count(), 2);
    }

    #[test]
    fn other_schemas_are_refused_by_name() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("old.json");
        std::fs::write(&path, r#"{"schema": "hattn-sweep/1", "points": []}"#).unwrap();
        let error = format!("{:#}", Report::load(&path).unwrap_err());
        assert!(error.ends_with("its schema is hattn-sweep/1; allowed: hattn-bench/1"), "{error}");
        std::fs::write(&path, report().json().unwrap()).unwrap();
        assert_eq!(Report::load(&path).unwrap(), report());
    }

    /// What would be divided by 0, overflow or have no place in a chart.
    #[test]
    fn numbers_that_nobody_measures_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("report.json");
        let refused = |pointer: &str, number: f64| {
            let mut json = serde_json::to_value(report()).unwrap();
            let place = json.pointer_mut(pointer).unwrap();
            *place = if number.fract() == 0.0 && number >= 0.0 { (number as u64).into() } else { number.into() };
            std::fs::write(&path, json.to_string()).unwrap();
            format!("{:#}", Report::load(&path).expect_err("it was read"))
        };
        assert!(refused("/points/0/point/heads_kv", 0.0).ends_with("heads_kv 0; allowed: 1 to 2147483647"));
        assert!(refused("/points/1/point/batch", 1e18).contains("batch 1000000000000000000; allowed: "));
        let run = |name: &str, number| refused(&format!("/points/0/runs/0/{name}"), number);
        let wrong = run("iqr_percent", -0.5);
        assert!(
            wrong.ends_with("fa3 at fwd/bf16/d64/causal/s512/b32/h32/kv32: iqr_percent -0.5; allowed: 0 to 1e12"),
            "{wrong}"
        );
        for (name, number) in [("tflops", 1.5e300), ("tflops", -0.5), ("q3_ms", 1e-300), ("median_ms", 0.0)] {
            let wrong = run(name, number);
            assert!(wrong.contains(&format!(": {name} ")) && wrong.ends_with("; allowed: 1e-12 to 1e12"), "{wrong}");
        }
        let wrong = refused("/ceilings/0/tera_per_s", 0.0);
        assert!(wrong.ends_with("ceiling product_bf16: tera_per_s 0; allowed: 1e-12 to 1e12"), "{wrong}");
    }

    #[test]
    fn ratios_and_ceilings() {
        let report = report();
        assert_eq!(report.names(), ["ours", "fa3", "none"]);
        assert!(report.variants().is_empty());
        let point = &report.points[0];
        assert_eq!(point.best_peer().unwrap().name, "fa3");
        assert!((point.ratio(point.best_peer()).unwrap() - 1.2).abs() < 1e-9);
        assert_eq!(point.ratio(point.run("none")), None);
        // The better of both measurements; at these lengths the bytes are the limit, at long ones the products.
        assert_eq!(report.ceiling("product_bf16"), Some(790.0));
        let p = &report.points[0].point;
        assert_eq!(report.roofline(p), Some(3.0 * p.flops() as f64 / p.bytes() as f64));
        assert_eq!(report.roofline(&Point { seqlen: 16384, batch: 1, ..p.clone() }), Some(790.0));
    }

    #[test]
    fn wrong_outputs_do_not_count() {
        let mut report = report();
        report.points[0].runs[0].status = RunStatus::Wrong;
        assert!(report.points[0].best_peer().is_none());
        assert_eq!(report.points[0].ratio(report.points[0].run("fa3")), None);
    }
}
