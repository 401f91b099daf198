//! A report as charts: TFLOP/s over the length, one SVG for each pass, type, head dim, mask and grouping.
//!
//! A chart has a background of its own and two sets of colours, of which the reader's browser picks one.

use anyhow::{Result, anyhow};
use plotters::coord::Shift;
use plotters::coord::types::RangedCoordf64;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use crate::text::{printable, thousands};
use crate::{Kind, Point, PointReport, Report, Role, distinct};

/// Width and height, in pixels.
pub const SIZE: (u32, u32) = (680, 430);
/// Width right of the plot, for the libraries' names.
const NAMES: u32 = 158;
/// Names are at least so far apart.
const LINE: i32 = 18;

/// A colour on a light and on a dark background.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Paint {
    light: RGBColor,
    dark: RGBColor,
}

const fn paint(light: (u8, u8, u8), dark: (u8, u8, u8)) -> Paint {
    Paint { light: RGBColor(light.0, light.1, light.2), dark: RGBColor(dark.0, dark.1, dark.2) }
}

const GROUND: Paint = paint((255, 255, 255), (13, 17, 23));
const GRID: Paint = paint((226, 229, 233), (45, 51, 59));
const INK: Paint = paint((31, 35, 40), (230, 237, 243));
const FAINT: Paint = paint((89, 99, 110), (145, 152, 161));
const ROOFLINE: Paint = paint((110, 119, 129), (139, 148, 158));
const OURS: Paint = paint((9, 105, 218), (88, 166, 255));
/// Well-known peers keep their colour from chart to chart.
const KNOWN: [(&str, Paint); 5] = [
    ("fa3", paint((188, 76, 0), (255, 155, 80))),
    ("cudnn", paint((26, 127, 55), (86, 211, 100))),
    ("fa2", paint((87, 96, 106), (175, 184, 193))),
    ("fa4", paint((130, 80, 223), (194, 151, 255))),
    ("naive", paint((191, 57, 137), (255, 128, 191))),
];
/// The others', in the order of the columns.
const OTHERS: [Paint; 4] = [
    paint((154, 103, 0), (227, 179, 65)),
    paint((27, 124, 131), (86, 212, 221)),
    paint((164, 14, 38), (255, 123, 114)),
    paint((78, 52, 46), (188, 170, 164)),
];

/// A chart.
pub struct Chart {
    /// The file's name: `fwd-bf16-d64-causal.svg`.
    pub file: String,
    /// What it shows, in words.
    pub title: String,
    /// The file's text.
    pub svg: String,
}

/// All charts of a report, in the order of its points.
///
/// # Errors
/// When nothing was timed that could be drawn.
pub fn charts(report: &Report) -> Result<Vec<Chart>> {
    let timed = report.points.iter().filter(|p| p.runs.iter().any(|run| run.rate().is_some()));
    let families = distinct(timed.map(|p| p.point.family()));
    anyhow::ensure!(!families.is_empty(), "the report has no point that was timed");
    let chart = |family: &String| {
        let mut points: Vec<&PointReport> = report.points.iter().filter(|p| p.point.family() == *family).collect();
        points.sort_by_key(|p| p.point.seqlen);
        let title = title(points[0]);
        let svg = draw(report, &points, &title).map_err(|error| anyhow!("drawing {family}: {error}"))?;
        Ok(Chart { file: format!("{family}.svg"), title, svg })
    };
    families.iter().map(chart).collect()
}

fn title(result: &PointReport) -> String {
    let p = &result.point;
    let grouped = if p.group() == 1 { String::new() } else { format!(", {} query heads a key head", p.group()) };
    let (packed, inputs) = (p.packed_words() + &p.named_scores(", "), p.named_inputs(", inputs "));
    let (pass, mask) = (p.direction.word(), p.mask_name());
    format!("Attention {pass}, {}, head dim {}, {mask} mask{grouped}{packed}{inputs}", p.dtype, p.head_dims())
}

/// What one library reached.
struct Line<'a> {
    name: &'a str,
    paint: Paint,
    width: u32,
    /// Place of the length, TFLOP/s at the third quartile, the median and the first quartile of the time.
    points: Vec<(f64, [f64; 3])>,
}

fn lines<'a>(report: &'a Report, points: &[&PointReport]) -> Vec<Line<'a>> {
    let mut others = OTHERS.iter().cycle();
    let mut lines = Vec::new();
    for name in report.names() {
        let mut role = Role::Peer;
        let mut timed = Vec::new();
        for (at, result) in points.iter().enumerate() {
            let Some(run) = result.run(name) else { continue };
            role = run.role;
            if let (Some(rate), Some(s)) = (run.rate(), &run.summary) {
                let at_quartile = |ms: f64| rate * s.median_ms / ms;
                timed.push((at as f64, [at_quartile(s.q3_ms), rate, at_quartile(s.q1_ms)]));
            }
        }
        let known = KNOWN.iter().find(|(known, _)| *known == name).map(|(_, paint)| *paint);
        let ours = role == Role::Ours && !lines.iter().any(|line: &Line<'_>| line.paint == OURS);
        let paint = if ours { OURS } else { known.unwrap_or_else(|| *others.next().unwrap_or(&FAINT)) };
        lines.push(Line { name, paint, width: if ours { 3 } else { 2 }, points: timed });
    }
    lines.retain(|line| !line.points.is_empty());
    lines
}

fn draw(report: &Report, points: &[&PointReport], title: &str) -> Result<String, Box<dyn std::error::Error>> {
    let lines = lines(report, points);
    let roofline: Vec<(f64, f64)> = points
        .iter()
        .enumerate()
        .filter_map(|(at, result)| Some((at as f64, report.roofline(&result.point)?)))
        .collect();
    let highest = lines.iter().flat_map(|line| line.points.iter().map(|(_, [.., most])| *most));
    let highest = highest.chain(roofline.iter().map(|(_, rate)| *rate)).fold(0.0, f64::max);
    let last = points.len() as f64 - 1.0;

    let mut svg = String::new();
    {
        let root = SVGBackend::with_string(&mut svg, SIZE).into_drawing_area();
        let commit = report.commit.as_ref().map_or_else(String::new, |commit| format!(", commit {commit}"));
        let day = report.date.split('T').next().unwrap_or_default();
        let p = &points[0].point;
        let sizes = format!("{} tokens a batch, {} query heads", p.batch * p.seqlen, p.heads_q);
        // XML has no place for most control characters.
        let about = printable(&format!("{}: {sizes}, {day}{commit}", report.device));
        write_titles(&root, title, &about)?;

        let mut chart = framed(&root).build_cartesian_2d(-0.25..last + 0.25, 0.0..highest * 1.06)?;
        let length = |x: &f64| place(*x).and_then(|at| points.get(at)).map_or_else(String::new, |p| below(&p.point));
        let decimals = if highest < 1.0 {
            2
        } else if highest < 10.0 {
            1
        } else {
            0
        };
        let is_ragged = points[0].point.family().contains("-ragged");
        let lengths = if is_ragged { "lengths of sequences" } else { "sequence length" };
        draw_axes(&mut chart, points.len(), [&length, &|y| format!("{y:.decimals$}")], [lengths, "TFLOP/s"])?;

        let mut names: Vec<(i32, String, Paint)> = Vec::new();
        if let Some(&end) = roofline.last() {
            chart.draw_series(DashedLineSeries::new(roofline.clone(), 6, 5, ROOFLINE.light.stroke_width(2)))?;
            names.push((chart.backend_coord(&end).1, format!("roofline {}", rate(end.1)), ROOFLINE));
        }
        // Ours last, above the others.
        for line in lines.iter().rev() {
            let medians = line.points.iter().map(|&(x, [_, y, _])| (x, y));
            let color = line.paint.light;
            chart.draw_series(LineSeries::new(medians.clone(), color.stroke_width(line.width)))?;
            chart.draw_series(
                line.points
                    .iter()
                    .map(|&(x, [low, _, high])| PathElement::new([(x, low), (x, high)], color.stroke_width(1))),
            )?;
            chart.draw_series(medians.clone().map(|at| Circle::new(at, line.width as i32 + 1, color.filled())))?;
            if let Some(&(x, [_, y, _])) = line.points.last() {
                let end = (x, y);
                names.push((
                    chart.backend_coord(&end).1,
                    format!("{} {}", printable(line.name), rate(end.1)),
                    line.paint,
                ));
            }
        }
        let x = SIZE.0 as i32 - NAMES as i32 - 6;
        write_names(&root, x, names)?;
        root.present()?;
    }
    Ok(themed(svg, &lines, title))
}

/// Ratios over named places, and what they are: a line for each name, and a dashed one at 1.
///
/// A line's points are the number of their place and the ratio. The name of a line has its last ratio beside it.
pub(crate) fn draw_ratios(
    title: &str,
    about: &str,
    places: &[String],
    ratios: &[(String, Vec<(usize, f64)>)],
    ratio_is: &str,
) -> Result<String, Box<dyn std::error::Error>> {
    let paints = [OURS].into_iter().chain(KNOWN.iter().map(|(_, paint)| *paint)).chain(OTHERS).cycle();
    let lines: Vec<Line<'_>> = ratios
        .iter()
        .zip(paints)
        .map(|((name, points), paint)| {
            let points = points.iter().map(|&(at, ratio)| (at as f64, [ratio; 3])).collect();
            Line { name, paint, width: 2, points }
        })
        .collect();
    let all = || lines.iter().flat_map(|line| line.points.iter().map(|(_, [ratio, ..])| *ratio));
    let (lowest, highest) = (all().fold(1.0, f64::min), all().fold(1.0, f64::max));
    let last = places.len() as f64 - 1.0;
    let mut svg = String::new();
    {
        let root = SVGBackend::with_string(&mut svg, SIZE).into_drawing_area();
        write_titles(&root, title, about)?;
        let mut chart = framed(&root).build_cartesian_2d(-0.25..last + 0.25, (lowest - 0.05)..(highest + 0.05))?;
        let name = |x: &f64| place(*x).and_then(|at| places.get(at)).cloned().unwrap_or_default();
        draw_axes(&mut chart, places.len(), [&name, &|y| format!("{y:.1}")], ["sequence length", ratio_is])?;
        let even = [(-0.25, 1.0), (last + 0.25, 1.0)];
        chart.draw_series(DashedLineSeries::new(even, 6, 5, ROOFLINE.light.stroke_width(2)))?;
        let mut names: Vec<(i32, String, Paint)> = Vec::new();
        for line in lines.iter().rev() {
            let points = line.points.iter().map(|&(x, [y, ..])| (x, y));
            let color = line.paint.light;
            chart.draw_series(LineSeries::new(points.clone(), color.stroke_width(line.width)))?;
            chart.draw_series(points.map(|at| Circle::new(at, line.width as i32 + 1, color.filled())))?;
            if let Some(&(x, [y, ..])) = line.points.last() {
                names.push((chart.backend_coord(&(x, y)).1, format!("{} {y:.2}", line.name), line.paint));
            }
        }
        write_names(&root, SIZE.0 as i32 - NAMES as i32 - 6, names)?;
        root.present()?;
    }
    Ok(themed(svg, &lines, title))
}

type Root<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type Plot<'a, 'b> = ChartContext<'a, SVGBackend<'b>, Cartesian2d<RangedCoordf64, RangedCoordf64>>;

/// The axes of a chart of so many places: the words of places and of values, and what both are.
fn draw_axes(
    chart: &mut Plot<'_, '_>,
    places: usize,
    [x, y]: [&dyn Fn(&f64) -> String; 2],
    [x_is, y_is]: [&str; 2],
) -> Result<()> {
    chart
        .configure_mesh()
        .disable_x_mesh()
        .light_line_style(TRANSPARENT)
        .bold_line_style(GRID.light)
        .axis_style(GRID.light)
        .x_labels(places)
        .x_label_formatter(x)
        .y_label_formatter(y)
        .label_style(style(16, FAINT))
        .axis_desc_style(style(16, FAINT))
        .x_desc(x_is)
        .y_desc(y_is)
        .draw()?;
    Ok(())
}

/// The ground of a chart, its title, and what it is about.
fn write_titles(root: &Root<'_>, title: &str, about: &str) -> Result<(), Box<dyn std::error::Error>> {
    root.fill(&GROUND.light)?;
    root.draw_text(title, &style(21, INK), (16, 12))?;
    root.draw_text(about, &style(14, FAINT), (16, 38))?;
    Ok(())
}

/// A chart below its titles, with space for labels and for the names of lines.
fn framed<'a, 'b>(root: &'a Root<'b>) -> ChartBuilder<'a, 'b, SVGBackend<'b>> {
    let mut builder = ChartBuilder::on(root);
    builder.margin_top(66).margin_left(8).margin_bottom(8).margin_right(NAMES);
    builder.x_label_area_size(46).y_label_area_size(66);
    builder
}

/// The number of a place on the x axis. `None` between places.
fn place(x: f64) -> Option<usize> {
    ((x.round() - x).abs() < 1e-6 && x >= -1e-6).then_some(x.round() as usize)
}

fn style(size: u32, paint: Paint) -> TextStyle<'static> {
    ("sans-serif", size).into_font().color(&paint.light)
}

/// The names beside the ends of their lines, moved apart where the lines end close together.
fn write_names(
    root: &Root<'_>,
    x: i32,
    mut names: Vec<(i32, String, Paint)>,
) -> Result<(), Box<dyn std::error::Error>> {
    names.sort_by_key(|(y, ..)| *y);
    let heights = spread(&names.iter().map(|(y, ..)| *y).collect::<Vec<_>>(), SIZE.1 as i32 - 50);
    for ((_, name, paint), y) in names.into_iter().zip(heights) {
        let style = style(17, paint).pos(Pos::new(HPos::Left, VPos::Center));
        root.draw_text(&name, &style, (x, y))?;
    }
    Ok(())
}

/// Ascending heights as near to the wanted ones as a line's height lets them be, none below `lowest`.
fn spread(wanted: &[i32], lowest: i32) -> Vec<i32> {
    let mut heights: Vec<i32> = Vec::with_capacity(wanted.len());
    for &y in wanted {
        heights.push(heights.last().map_or(y, |above| y.max(above + LINE)));
    }
    let mut limit = lowest;
    for y in heights.iter_mut().rev() {
        *y = (*y).min(limit);
        limit = *y - LINE;
    }
    heights
}

/// What stands below a point: the length of its sequences, or of packed ones that differ how they are spread.
fn below(point: &Point) -> String {
    match point.packed.as_ref().map(|packed| packed.kind) {
        None => thousands(point.seqlen),
        Some(Kind::Equal(length)) => thousands(length),
        Some(Kind::Lognormal(mean)) => format!("mean {}", thousands(mean)),
        Some(Kind::Long) => "one long".into(),
        Some(Kind::Documents(most)) => format!("cut at {}", thousands(most)),
    }
}

fn rate(rate: f64) -> String {
    if rate < 1.0 {
        format!("{rate:.3}")
    } else if rate < 100.0 {
        format!("{rate:.1}")
    } else {
        format!("{rate:.0}")
    }
}

/// Adds the title for screen readers and the dark colours: the light ones stand in the attributes, for viewers without CSS.
fn themed(svg: String, lines: &[Line<'_>], title: &str) -> String {
    let mut paints = vec![GROUND, GRID, INK, FAINT, ROOFLINE];
    paints.extend(lines.iter().map(|line| line.paint));
    let mut rules = String::new();
    for Paint { light, dark } in paints {
        let hex = |RGBColor(r, g, b)| format!("#{r:02X}{g:02X}{b:02X}");
        for what in ["fill", "stroke"] {
            let rule = format!("[{what}=\"{}\"]{{{what}:{}}}", hex(light), hex(dark));
            if !rules.contains(&rule) {
                rules += &rule;
            }
        }
    }
    let head = format!("<title>{title}</title>\n<style>@media (prefers-color-scheme: dark){{{rules}}}</style>\n");
    match svg.find(">\n") {
        Some(at) => format!("{}{head}{}", &svg[..at + 2], &svg[at + 2..]),
        None => svg,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Direction;
    use crate::report::tests::report;

    fn svg() -> String {
        charts(&report()).unwrap().remove(0).svg
    }

    #[test]
    fn one_chart_a_family() {
        let mut report = report();
        let mut other = report.points[0].clone();
        other.point.heads_kv = 4;
        report.points.push(other);
        let mut backward = report.points[0].clone();
        backward.point.direction = Direction::Bwd;
        report.points.push(backward);
        let charts = charts(&report).unwrap();
        let files: Vec<&str> = charts.iter().map(|chart| chart.file.as_str()).collect();
        assert_eq!(files, ["fwd-bf16-d64-causal.svg", "fwd-bf16-d64-causal-gqa8.svg", "bwd-bf16-d64-causal.svg"]);
        assert_eq!(charts[2].title, "Attention backward, bf16, head dim 64, causal mask");
        assert_eq!(charts[1].title, "Attention forward, bf16, head dim 64, causal mask, 8 query heads a key head");
        assert!(super::charts(&Report { points: vec![], ..report }).is_err());
    }

    /// Reads the picture back: what is drawn, where, in which colours.
    #[test]
    fn the_picture_shows_what_was_measured() {
        let text = svg();
        let document = roxmltree::Document::parse(&text).expect("well-formed XML");
        let texts: Vec<(String, f64, f64)> = document
            .descendants()
            .filter(|node| node.has_tag_name("text"))
            .map(|node| {
                let place = |name| node.attribute(name).and_then(|x| x.parse().ok()).expect("a place");
                (node.text().unwrap_or_default().trim().to_string(), place("x"), place("y"))
            })
            .collect();
        for (text, x, y) in &texts {
            assert!((0.0..f64::from(SIZE.0)).contains(x) && (0.0..f64::from(SIZE.1)).contains(y), "{text} is outside");
        }
        let place = |wanted: &str| {
            texts.iter().find(|(text, ..)| text == wanted).unwrap_or_else(|| panic!("{wanted}: {texts:?}"))
        };
        // Ours and the peer end at the same rate: their names stand apart. The roofline is above both.
        let (ours, fa3, roofline) = (place("ours 500").2, place("fa3 500").2, place("roofline 762").2);
        assert!((ours - fa3).abs() >= f64::from(LINE) && roofline < ours.min(fa3) - f64::from(LINE));
        assert!(place("1k").1 > place("512").1);
        // Whoever has no timing has no line.
        assert!(!texts.iter().any(|(text, ..)| text.starts_with("none")));

        let lines = |paint: Paint| {
            let RGBColor(r, g, b) = paint.light;
            let color = format!("#{r:02X}{g:02X}{b:02X}");
            let polylines = document.descendants().filter(|node| node.has_tag_name("polyline"));
            let of_color = polylines.filter(|node| node.attribute("stroke") == Some(&color));
            of_color.filter_map(|node| node.attribute("points")).map(str::to_owned).collect::<Vec<_>>()
        };
        let heights = |points: &str| {
            points.split_whitespace().map(|p| p.split_once(',').unwrap().1.parse::<f64>().unwrap()).collect::<Vec<_>>()
        };
        let own = heights(&lines(OURS)[0]);
        let peer = heights(&lines(KNOWN[0].1)[0]);
        assert_eq!((own.len(), peer.len()), (2, 2));
        assert!(own[0] < own[1] && peer[0] == peer[1] && own[1] == peer[1], "600 is above 500: {own:?} {peer:?}");
        assert!(!lines(ROOFLINE).is_empty());
    }

    #[test]
    fn every_colour_has_a_dark_one() {
        let text = svg();
        let document = roxmltree::Document::parse(&text).expect("well-formed XML");
        let style = document
            .descendants()
            .find(|node| node.has_tag_name("style"))
            .and_then(|node| node.text())
            .expect("a style");
        assert!(style.starts_with("@media (prefers-color-scheme: dark)"));
        for node in document.descendants() {
            for what in ["fill", "stroke"] {
                let visible = node.attribute(&*format!("{what}-opacity")).or(node.attribute("opacity")) != Some("0");
                if let Some(color) = node.attribute(what).filter(|color| *color != "none" && visible) {
                    assert!(
                        style.contains(&format!("[{what}=\"{color}\"]")),
                        "{what} {color} stays as it is: {:?}",
                        node.tag_name()
                    );
                }
            }
        }
    }

    #[test]
    fn paints_stand_out_from_their_ground() {
        // The contrast that WCAG asks of graphics and large text.
        let luminance = |RGBColor(r, g, b): RGBColor| {
            let linear = |x: u8| (f64::from(x) / 255.0).powf(2.2);
            0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b)
        };
        let contrast = |a, b| {
            let (a, b) = (luminance(a), luminance(b));
            (a.max(b) + 0.05) / (a.min(b) + 0.05)
        };
        let peers = KNOWN.iter().map(|(_, paint)| *paint).chain(OTHERS);
        for paint in peers.chain([OURS, INK, FAINT, ROOFLINE]) {
            assert!(contrast(paint.light, GROUND.light) >= 4.0, "{paint:?} on light");
            assert!(contrast(paint.dark, GROUND.dark) >= 4.0, "{paint:?} on dark");
        }
    }

    #[test]
    fn names_do_not_cover_each_other() {
        assert_eq!(spread(&[10, 100], 400), [10, 100]);
        assert_eq!(spread(&[100, 101, 102], 400), [100, 118, 136]);
        assert_eq!(spread(&[390, 395], 400), [382, 400]);
        assert!(spread(&[], 400).is_empty());
    }
}
