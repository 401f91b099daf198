//! A report on the terminal. Tables have colours, so what is in their cells is made printable here. The lines that are no
//! tables are made printable where they are printed.

use comfy_table::{Attribute, Cell, CellAlignment, Color, Table, presets};

use crate::host::HostCost;
use crate::text::{excerpt, printable};
use crate::{DENSE, Direction, PointReport, Report, Run, RunStatus, distinct, geometric_mean};

/// A name in a table is cut to so many characters.
const LONGEST: usize = 60;

/// One line a point: TFLOP/s of each library, ours over the best peer and (where sequences are packed) over ours on a
/// dense batch, our share of the roofline, the widest interquartile range. The inputs are named where they are not all
/// normal. Colours only where stdout is a terminal.
pub fn points(report: &Report) -> Table {
    let names = report.names();
    let mut table = Table::new();
    table.load_preset(presets::NOTHING);
    let fixed = ["pass", "dtype", "hd", "mask", "gqa", "seqlen"];
    let normal = is_normal(report);
    let inputs = (!normal).then_some("inputs");
    let dense = report.points.iter().any(|p| p.dense().is_some()).then_some("ours/dense");
    let header = fixed.into_iter().chain(inputs).chain(names.iter().copied()).chain(["ours/best"]).chain(dense);
    let header = header.chain(["roofline", "iqr"]);
    table.set_header(header.map(name));
    for result in &report.points {
        let p = &result.point;
        let sizes = [p.head_dims().to_string(), p.mask_name(), p.group().to_string(), p.lengths()];
        let mut row: Vec<Cell> =
            [p.direction.to_string(), p.dtype.to_string()].into_iter().chain(sizes).map(Cell::new).collect();
        row.extend((!normal).then(|| Cell::new(p.inputs_name())));
        let best = result.best_peer().map(|run| run.name.as_str());
        row.extend(names.iter().map(|name| match result.run(name) {
            Some(run) if best == Some(run.name.as_str()) => rate(run).add_attribute(Attribute::Underlined),
            Some(run) => rate(run),
            None => Cell::new("absent").fg(Color::DarkGrey),
        }));
        row.push(ratio(result.ratio(result.best_peer())));
        row.extend(dense.map(|_| ratio(result.ratio(result.dense()))));
        row.push(share(report, result));
        let spreads = result.runs.iter().filter_map(|run| run.summary.as_ref()).map(|s| s.iqr_percent);
        row.push(Cell::new(
            spreads
                .fold(None, |a: Option<f64>, b| Some(a.map_or(b, |a| a.max(b))))
                .map_or("-".into(), |x| format!("{x:.1}%")),
        ));
        table.add_row(row);
    }
    for column in table.column_iter_mut() {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

/// Whether all inputs are normal.
fn is_normal(report: &Report) -> bool {
    report.points.iter().all(|p| p.point.is_normal())
}

/// One line a forward: the error of our O against f64, and how many times that of each peer it is. None where no error of ours
/// was measured, as in older records.
pub fn errors(report: &Report) -> Option<Table> {
    let ours = |p: &PointReport| p.ours().and_then(Run::error_of_o);
    let peers: Vec<&str> = report
        .names()
        .into_iter()
        .filter(|name| report.points.iter().any(|p| p.error_ratio(p.peer(name)).is_some()))
        .collect();
    let mut table = Table::new();
    table.load_preset(presets::NOTHING);
    let header = ["error of o".to_string(), "rms".into(), "max".into()].into_iter();
    table.set_header(
        header.chain(peers.iter().flat_map(|name| [format!("rms / {name}"), format!("max / {name}")])).map(name),
    );
    for result in &report.points {
        let Some([rms, largest]) = ours(result) else { continue };
        let mut row = vec![
            Cell::new(&result.point),
            Cell::new(format!("{rms:.2e}")).set_alignment(CellAlignment::Right),
            Cell::new(format!("{largest:.2e}")).set_alignment(CellAlignment::Right),
        ];
        for name in &peers {
            let ratios = result.error_ratio(result.peer(name));
            let cell = |i: usize| Cell::new(ratios.map_or("-".into(), |ratios| format!("{:.3}", ratios[i])));
            row.extend([0, 1].map(|i| cell(i).set_alignment(CellAlignment::Right)));
        }
        table.add_row(row);
    }
    (table.row_count() > 0).then_some(table)
}

/// A name, as a report or a harness has it.
fn name(name: impl AsRef<str>) -> Cell {
    Cell::new(excerpt(name.as_ref(), LONGEST)).add_attribute(Attribute::Bold)
}

fn rate(run: &Run) -> Cell {
    let word = match run.status {
        RunStatus::Ok => return Cell::new(run.rate().map_or("-".into(), digits)),
        RunStatus::Wrong => "wrong",
        RunStatus::Unsupported => "unsupported",
        RunStatus::Failed => "failed",
    };
    Cell::new(word).fg(if run.status == RunStatus::Unsupported { Color::DarkGrey } else { Color::Red })
}

/// Three digits are what the measurement carries.
fn digits(rate: f64) -> String {
    match rate {
        rate if rate >= 100.0 => format!("{rate:.1}"),
        rate if rate >= 1.0 => format!("{rate:.2}"),
        rate => format!("{rate:.4}"),
    }
}

/// Green where we are at least as fast, yellow where the noise could hide it, red elsewhere.
fn ratio(ratio: Option<f64>) -> Cell {
    let Some(ratio) = ratio else { return Cell::new("-") };
    let color = match ratio {
        r if r >= 1.0 => Color::Green,
        r if r >= 0.98 => Color::Yellow,
        _ => Color::Red,
    };
    Cell::new(format!("{ratio:.3}")).fg(color).add_attribute(Attribute::Bold)
}

fn share(report: &Report, result: &PointReport) -> Cell {
    let share = report.roofline(&result.point).and_then(|roof| Some(result.ours()?.rate()? / roof));
    Cell::new(share.map_or("-".into(), |share| format!("{:.0}%", 100.0 * share)))
}

/// Ours over each peer and over the best of them, and our variants over ours: minimum and geometric mean. Our errors of O over
/// each peer's. A pass and a class, or a file, of inputs at a time.
pub fn ratios(report: &Report) -> Vec<String> {
    let all = report.inputs();
    let of_pass = |direction| all.iter().flat_map(move |&inputs| ratios_of(report, direction, inputs));
    Direction::ALL.into_iter().flat_map(of_pass).collect()
}

fn ratios_of(report: &Report, direction: Direction, inputs: &str) -> Vec<String> {
    let is_one = |p: &&PointReport| p.point.direction == direction && p.point.inputs_name() == inputs;
    let all: Vec<&PointReport> = report.points.iter().filter(is_one).collect();
    let pass = match direction {
        Direction::Fwd => "",
        Direction::Bwd => "backward, ",
    };
    let pass = if is_normal(report) { pass.to_string() } else { format!("{pass}{inputs}, ") };
    let mut lines = Vec::new();
    let mut line = |what: String, values: Vec<f64>| {
        let least = values.iter().copied().fold(f64::INFINITY, f64::min);
        let Some(mean) = geometric_mean(&values) else { return };
        let (points, of) = (values.len(), all.len());
        lines.push(format!("{pass}{what}: geometric mean {mean:.3}, least {least:.3}, over {points} of {of} points"));
    };
    line("ours / best peer".into(), all.iter().filter_map(|p| p.ratio(p.best_peer())).collect());
    for name in report.names() {
        if all.iter().any(|p| p.peer(name).is_some()) {
            line(format!("ours / {name}"), all.iter().filter_map(|p| p.ratio(p.run(name))).collect());
        }
    }
    for name in report.variants() {
        let words = if name.ends_with(DENSE) { format!("ours / {name}") } else { format!("{name} / ours") };
        line(words, all.iter().filter_map(|p| p.variant_ratio(name)).collect());
    }
    for name in report.names() {
        let errors: Vec<[f64; 2]> = all.iter().filter_map(|p| p.error_ratio(p.peer(name))).collect();
        let [rms, largest] = [0, 1].map(|i| errors.iter().map(|ratios| ratios[i]).collect::<Vec<f64>>());
        let (Some(rms_mean), Some(mean)) = (geometric_mean(&rms), geometric_mean(&largest)) else { continue };
        let [rms_most, most] = [rms, largest].map(|ratios| ratios.into_iter().fold(0.0, f64::max));
        lines.push(format!(
            "{pass}error of o / that of {name}: rms mean {rms_mean:.3}, largest {rms_most:.3}; max mean {mean:.3}, largest {most:.3}"
        ));
    }
    lines
}

/// What a reader of the table must know: ceilings, the card, whoever was not timed and why, notes.
pub fn remarks(report: &Report) -> Vec<String> {
    let mut lines = Vec::new();
    for what in distinct(report.ceilings.iter().map(|ceiling| ceiling.what.as_str())) {
        let (best, unit) = (report.ceiling(what).unwrap_or(0.0), if what == "copy" { "TB/s" } else { "TFLOP/s" });
        lines.push(format!("ceiling: {what} {} {unit}", digits(best)));
    }
    for (when, state) in [("before", &report.state_before), ("after", &report.state_after)] {
        lines.extend(state.as_ref().map(|state| format!("card {when}: {}", state.line())));
    }
    let busy: Vec<_> = report.points.iter().filter_map(|p| p.busy.as_ref()).collect();
    let clocks: Vec<[f64; 3]> = busy.iter().filter_map(|busy| busy.sm_mhz).collect();
    if let Some(least) = clocks.iter().map(|[least, ..]| *least).reduce(f64::min) {
        let reasons: std::collections::BTreeSet<&str> =
            busy.iter().flat_map(|b| b.reasons.iter().map(String::as_str)).collect();
        let most = clocks.iter().map(|[.., most]| *most).fold(0.0, f64::max);
        lines.push(format!(
            "card while busy: SM {least:.0} to {most:.0} MHz, reasons seen: {}",
            reasons.into_iter().collect::<Vec<_>>().join(", ")
        ));
    }
    let mut told: Vec<(&str, &str)> = Vec::new();
    for result in &report.points {
        for run in &result.runs {
            if let Some(error) = run.error.as_deref().filter(|error| !told.contains(&(&run.name, error))) {
                told.push((&run.name, error));
                lines.push(format!("NOT TIMED OR WRONG: {}, first at {}: {error}", run.name, result.point));
            }
        }
    }
    lines.extend(report.missing.iter().map(|x| format!("MISSING: {}: {}", x.name, x.error)));
    lines.extend(report.notes.iter().map(|note| format!("note: {note}")));
    lines
}

/// What the calls cost on the host: a line a kind of call, a column a problem.
pub fn host(cost: &HostCost) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING);
    let problems = cost.problems();
    let header = ["host cost, us".to_string()]
        .into_iter()
        .chain(problems.iter().map(ToString::to_string))
        .chain(["driver calls".into()]);
    table.set_header(header.map(name));
    for kind in distinct(cost.calls.iter().map(|call| call.what.as_str())) {
        let mut row = vec![Cell::new(excerpt(kind, LONGEST))];
        row.extend(problems.iter().map(|problem| {
            let call = cost.calls.iter().find(|call| call.what == kind && call.problem == *problem);
            Cell::new(
                call.map_or("-".into(), |call| format!("{:.2} ({:.2} to {:.2})", call.us[1], call.us[0], call.us[2])),
            )
        }));
        let counted =
            cost.calls.iter().rev().find(|call| call.what == kind).and_then(|call| call.driver_calls.as_ref());
        let calls = counted.map_or("not counted".into(), |calls| {
            let each =
                calls.iter().map(|(name, count)| if *count == 1.0 { name.clone() } else { format!("{count} {name}") });
            each.collect::<Vec<_>>().join(", ")
        });
        row.push(Cell::new(printable(&calls)));
        table.add_row(row);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::HostCall;
    use crate::report::tests::report;
    use crate::{Packed, Summary};

    #[test]
    fn a_line_a_point() {
        let text = points(&report()).to_string();
        let lines: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(lines[0][6..], ["ours", "fa3", "none", "ours/best", "roofline", "iqr"]);
        let roof = report().roofline(&report().points[0].point).unwrap();
        let share = format!("{:.0}%", 60000.0 / roof);
        assert_eq!(
            lines[1],
            ["fwd", "bf16", "64", "causal", "1", "512", "600.0", "500.0", "unsupported", "1.200", &share, "2.0%"]
        );
        assert_eq!(lines.len(), 3);
    }

    #[test]
    fn classes_of_inputs_and_errors() {
        assert!(errors(&report()).is_none());
        let mut both = report();
        both.points[1].point.inputs = crate::Class::Sink;
        for result in &mut both.points {
            for (run, error) in result.runs.iter_mut().zip([1e-3, 1.1e-3, 5e-3]) {
                run.check.insert("rms".into(), error.into());
                run.check.insert("max".into(), (3.0 * error).into());
            }
        }
        let text = points(&both).to_string();
        let lines: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!((lines[0][6], lines[1][6], lines[2][6]), ("inputs", "normal", "sink"));
        let text = errors(&both).unwrap().to_string();
        let lines: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
        // A run that was not timed has no error.
        assert_eq!(lines[0], ["error", "of", "o", "rms", "max", "rms", "/", "fa3", "max", "/", "fa3"]);
        assert_eq!(
            lines[2],
            ["fwd/bf16/d64/causal/s1024/b16/h32/kv32/sink", "1.10e-3", "3.30e-3", "1.100", "1.100"],
            "{text}"
        );
        let means = ratios(&both);
        assert_eq!(means[0], "normal, ours / best peer: geometric mean 1.200, least 1.200, over 1 of 1 points");
        assert_eq!(
            means[2],
            "normal, error of o / that of fa3: rms mean 1.100, largest 1.100; max mean 1.100, largest 1.100"
        );
        assert!(means.len() == 6 && means[3].starts_with("sink, ours / best peer"), "{means:?}");
    }

    #[test]
    fn packed_points_beside_dense_ones() {
        let mut packed = report();
        for result in &mut packed.points {
            let [count, length] = [result.point.batch, result.point.seqlen];
            result.point.packed = Some(Packed::equal(count, length));
            (result.point.batch, result.point.seqlen) = (1, count * length);
            let ours = result.ours().unwrap().clone();
            let dense = Summary::new(vec![1.0; 3], result.flops).unwrap();
            let name = format!("{}{DENSE}", ours.name);
            result.runs.push(Run { name, summary: Some(dense), ..ours });
        }
        let text = points(&packed).to_string();
        let lines: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(lines[0][6..12], ["ours", "ours-dense", "fa3", "none", "ours/best", "ours/dense"]);
        assert_eq!((lines[1][5], lines[1][10]), ("equal512/t16384", "1.200"));
        let point = &packed.points[0];
        let ratio = point.ratio(point.dense()).unwrap();
        assert_eq!(lines[1][11], format!("{ratio:.3}"));
        let means = ratios(&packed);
        assert!(means.iter().any(|line| line.starts_with("ours / ours-dense: geometric mean")), "{means:?}");
        assert!(!means.iter().any(|line| line.contains("ours-dense / ours")), "{means:?}");
    }

    #[test]
    fn means_and_remarks() {
        let means = ratios(&report());
        assert_eq!(means[0], "ours / best peer: geometric mean 1.095, least 1.000, over 2 of 2 points");
        assert_eq!(means.len(), 2, "{means:?}"); // a peer without a timing has no mean
        let mut both = report();
        both.points[1].point.direction = Direction::Bwd;
        let means = ratios(&both);
        assert_eq!(means[0], "ours / best peer: geometric mean 1.200, least 1.200, over 1 of 1 points");
        assert_eq!(means[2], "backward, ours / best peer: geometric mean 1.000, least 1.000, over 1 of 1 points");
        assert_eq!(means.len(), 4, "{means:?}");
        let mut varied = report();
        varied.points.iter_mut().for_each(|p| p.runs[0].role = crate::Role::Ours);
        varied.points.iter_mut().for_each(|p| p.runs.swap(0, 1));
        let means = ratios(&varied);
        assert_eq!(means, ["fa3 / ours: geometric mean 0.913, least 0.833, over 2 of 2 points"]);
        let text = remarks(&report()).join("\n");
        assert!(text.contains("ceiling: product_bf16 790.0 TFLOP/s"), "{text}");
        assert!(
            text.contains("NOT TIMED OR WRONG: none, first at fwd/bf16/d64/causal/s512/b32/h32/kv32: no kernel"),
            "{text}"
        );
        assert!(text.contains("MISSING: fa4: no module"), "{text}");
        assert_eq!(text.matches("no kernel").count(), 1);
    }

    #[test]
    fn host_costs() {
        let call = |what: &str, problem: &str, us: f64, calls: &[(&str, f64)]| HostCall {
            what: what.into(),
            problem: problem.into(),
            us: [us - 0.5, us, us + 0.5],
            driver_calls: (!calls.is_empty()).then(|| calls.iter().map(|(name, n)| (name.to_string(), *n)).collect()),
        };
        let cost = HostCost {
            calls: vec![
                call("run", "full", 4.0, &[("cuLaunchKernelEx", 1.0)]),
                call("run", "causal", 5.0, &[("cuLaunchKernelEx", 1.0), ("cuCtxGetCurrent", 2.0)]),
                call("plan", "causal", 9.0, &[]),
            ],
            notes: vec![],
        };
        let text = host(&cost).to_string();
        assert!(text.contains("4.00 (3.50 to 4.50)") && text.contains("2 cuCtxGetCurrent, cuLaunchKernelEx"), "{text}");
        assert!(text.lines().last().is_some_and(|line| line.contains("not counted")), "{text}");
    }
}
