//! The JSON of a sweep. `peers/sweep.py` writes the same schema, with more libraries a point and more about the card.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{Point, Summary};

/// The schema's name and version; it changes when a field changes its meaning or goes.
pub const SCHEMA: &str = "hattn-sweep/1";

/// A whole sweep.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// [`SCHEMA`].
    pub schema: String,
    /// The commit that was measured, where it was told.
    pub commit: Option<String>,
    /// When, as RFC 3339 in UTC.
    pub date: String,
    /// The device's name.
    pub device: String,
    /// The driver's version; none on a CPU.
    pub driver: Option<String>,
    /// Versions of what took part.
    pub versions: BTreeMap<String, serde_json::Value>,
    /// How the timings were taken, in words.
    pub method: String,
    /// The options as given or defaulted.
    pub options: BTreeMap<String, serde_json::Value>,
    /// What a reader must know besides.
    pub notes: Vec<String>,
    /// The points, in the order measured.
    pub points: Vec<PointReport>,
}

/// One point of a sweep.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PointReport {
    /// The sizes.
    pub point: Point,
    /// The operations that rates are made of, see [`Point::forward_flops`].
    pub flops: u64,
    /// One run a library.
    pub runs: Vec<Run>,
}

/// Whose library it is.
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
    /// The output is wrong; a timing, where there is one, must not count.
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
    /// Whose it is.
    pub role: Role,
    /// How it ended.
    pub status: RunStatus,
    /// Why, unless it is [`RunStatus::Ok`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// The plan, as it prints itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub plan: Option<String>,
    /// Errors found before the timing, by name; a NaN is text.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub check: BTreeMap<String, serde_json::Value>,
    /// The timings; none unless it was timed.
    #[serde(flatten)]
    pub summary: Option<Summary>,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report() -> Report {
        let point = Point { causal: true, ..Point::new(64, 64, 16, 32, None) };
        let run = |status, error, summary| Run {
            name: "ours".into(),
            role: Role::Ours,
            status,
            error,
            plan: None,
            check: BTreeMap::new(),
            summary,
        };
        let timed = run(RunStatus::Ok, None, Summary::new(vec![1.0, 2.0], point.forward_flops()));
        let failed = run(RunStatus::Unsupported, Some("no kernel".into()), None);
        Report {
            schema: SCHEMA.into(),
            commit: Some("abc".into()),
            date: "2026-01-02T03:04:05Z".into(),
            device: "cpu".into(),
            driver: None,
            versions: BTreeMap::new(),
            method: "wall clock".into(),
            options: BTreeMap::new(),
            notes: vec![],
            points: vec![PointReport { flops: point.forward_flops(), point, runs: vec![timed, failed] }],
        }
    }

    #[test]
    fn json_has_the_names_that_readers_rely_on() {
        let json = serde_json::to_value(report()).unwrap();
        assert_eq!(json["schema"], "hattn-sweep/1");
        let point = &json["points"][0];
        assert_eq!(point["point"]["seqlen"], 16);
        assert_eq!(point["point"]["causal"], true);
        assert_eq!(point["flops"], 4 * 16 * 16 * 64 * 4 / 2);
        let timed = &point["runs"][0];
        assert_eq!((&timed["role"], &timed["status"]), (&"ours".into(), &"ok".into()));
        assert_eq!((&timed["ms"], &timed["median_ms"]), (&vec![1.0, 2.0].into(), &1.5.into()));
        for key in ["q1_ms", "q3_ms", "iqr_percent", "tflops"] {
            assert!(timed[key].is_f64(), "{key}: {timed}");
        }
        assert!(timed.get("error").is_none());
        assert_eq!(point["runs"][1]["error"], "no kernel");
        assert!(point["runs"][1].get("ms").is_none());
    }

    #[test]
    fn json_comes_back_as_it_went() {
        let text = serde_json::to_string(&report()).unwrap();
        assert_eq!(serde_json::from_str::<Report>(&text).unwrap(), report());
    }

    #[test]
    fn what_the_python_sweep_adds_is_skipped() {
        let mut json = serde_json::to_value(report()).unwrap();
        json["summary"] = serde_json::json!({"best_peer": {"min": null}});
        json["points"][0]["busy"] = serde_json::json!([{"sm_mhz": 1980, "reasons": "none"}]);
        json["points"][0]["runs"][0]["host_us"] = 12.5.into();
        json["points"][0]["runs"][0]["check"] = serde_json::json!({"slice": "nan", "unwritten": 3});
        let read: Report = serde_json::from_value(json).unwrap();
        assert_eq!(read.points[0].runs[0].check.len(), 2);
    }
}
