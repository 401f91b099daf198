//! A report as CSV: a line for each library at each point, with everything that names the line and every raw sample.

use std::io::Write;

use anyhow::Result;

use crate::{Packed, Report, RunStatus};

/// Writes a report. Sizes, names and the machine come first, then the statistics, then `ms_1`, `ms_2`, ...
///
/// # Errors
/// When the writer fails.
pub fn write(report: &Report, writer: impl Write) -> Result<()> {
    let most =
        report.points.iter().flat_map(|p| &p.runs).filter_map(|run| run.summary.as_ref()).map(|s| s.ms.len()).max();
    let mut csv = csv::Writer::from_writer(writer);
    let fixed = [
        "direction",
        "dtype",
        "head_dim",
        "mask",
        "seqlen",
        "queries",
        "batch",
        "heads_q",
        "heads_kv",
        "library",
        "role",
        "status",
        "device",
        "driver",
        "commit",
        "date",
        "versions",
        "flops",
        "bytes",
        "roofline_tflops",
        "tflops",
        "median_ms",
        "q1_ms",
        "q3_ms",
        "host_us",
        "inputs",
        "packed",
        "sequences",
        "longest",
        "rms_error_of_o",
        "max_error_of_o",
        "error",
    ];
    let samples = (1..=most.unwrap_or(0)).map(|i| format!("ms_{i}"));
    csv.write_record(fixed.map(String::from).into_iter().chain(samples))?;
    let versions: Vec<String> =
        report.versions.iter().map(|(name, value)| format!("{name} {}", value.to_string().trim_matches('"'))).collect();
    let number = |value: Option<f64>| value.map_or_else(String::new, |value| value.to_string());
    for result in &report.points {
        let p = &result.point;
        for run in &result.runs {
            let s = run.summary.as_ref();
            let status = match run.status {
                RunStatus::Ok => "ok",
                RunStatus::Wrong => "wrong",
                RunStatus::Unsupported => "unsupported",
                RunStatus::Failed => "failed",
            };
            let mut record = vec![
                p.direction.to_string(),
                p.dtype.to_string(),
                p.head_dims().to_string(),
                p.mask_name(),
                p.seqlen.to_string(),
                p.seqlen_q().to_string(),
                p.batch.to_string(),
                p.heads_q.to_string(),
                p.heads_kv.to_string(),
                run.name.clone(),
                format!("{:?}", run.role).to_lowercase(),
                status.into(),
                report.device.clone(),
                report.driver.clone().unwrap_or_default(),
                report.commit.clone().unwrap_or_default(),
                report.date.clone(),
                versions.join("; "),
                result.flops.to_string(),
                result.bytes.to_string(),
                number(report.roofline(p)),
                number(s.map(|s| s.tflops)),
                number(s.map(|s| s.median_ms)),
                number(s.map(|s| s.q1_ms)),
                number(s.map(|s| s.q3_ms)),
                number(run.host_us),
                p.inputs_name().into(),
                p.packed.as_ref().map_or_else(String::new, |packed| packed.kind.to_string()),
                p.sequences().to_string(),
                p.packed.as_ref().map_or(p.seqlen, Packed::longest).to_string(),
                number(run.error_of_o().map(|[rms, _]| rms)),
                number(run.error_of_o().map(|[_, largest]| largest)),
                run.error.clone().unwrap_or_default(),
            ];
            record.extend(s.into_iter().flat_map(|s| s.ms.iter().map(f64::to_string)));
            record.resize(fixed.len() + most.unwrap_or(0), String::new());
            csv.write_record(record)?;
        }
    }
    Ok(csv.flush()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_sample_is_there_and_every_line_says_what_it_is() {
        let report = crate::report::tests::report();
        let mut bytes = Vec::new();
        write(&report, &mut bytes).unwrap();
        let mut csv = csv::Reader::from_reader(&bytes[..]);
        let header = csv.headers().unwrap().clone();
        let column = |name: &str| header.iter().position(|column| column == name).unwrap();
        let lines: Vec<_> = csv.records().map(Result::unwrap).collect();
        assert_eq!(lines.len(), 6);
        let ours = &lines[1];
        for (name, value) in [
            ("library", "ours"),
            ("role", "ours"),
            ("status", "ok"),
            ("mask", "causal"),
            ("seqlen", "512"),
            ("inputs", "normal"),
            ("packed", ""),
            ("sequences", "32"),
            ("longest", "512"),
            ("rms_error_of_o", ""),
            ("commit", "abc"),
            ("versions", "torch 2.11"),
        ] {
            assert_eq!(&ours[column(name)], value, "{name}");
        }
        let ms = &report.points[0].runs[1].summary.as_ref().unwrap().ms;
        assert_eq!((1..=5).map(|i| ours[column(&format!("ms_{i}"))].parse().unwrap()).collect::<Vec<f64>>(), *ms);
        assert_eq!(
            (&lines[2][column("status")], &lines[2][column("error")], &lines[2][column("ms_1")]),
            ("unsupported", "no kernel", "")
        );
    }
}
