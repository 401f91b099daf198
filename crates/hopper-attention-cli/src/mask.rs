//! `hattn mask`: which keys each query keeps, as a picture.

use std::fmt::Write as _;
use std::ops::Range;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use hopper_attention::{Access, Band, BlockMask, DType, Dims, ForwardProblem, Mask, Operand, Presence, Slot};
use png::{BitDepth, ColorType, Encoder};

use crate::args::{BlockMaskArg, FileLayout, MaskArgs};
use crate::blocks::{self, Lists, Table};
use crate::input::TensorFile;
use crate::layout::{axes, logical};
use crate::output::AtomicFile;
use crate::report;
use crate::request::sequences;
use crate::values::{Tensors, lengths};

/// The most rows and columns that are drawn. Of more, each stands for several.
const MOST: usize = 64;
/// The most queries and keys of a picture in a file.
const MOST_PIXELS: usize = 1 << 26;

/// The most pairs of lists that are made to be drawn.
const MOST_LISTED: usize = 1 << 30;

/// `hattn mask`.
pub fn mask(args: &MaskArgs) -> Result<()> {
    if let Some(path) = &args.input {
        let input = TensorFile::open(path)?;
        if input.layout()? == Some(FileLayout::Thd) {
            return packed(args, path, input);
        }
        let (dims, form, tensors) = of_file(path, input)?;
        let lists = blocks::lists(&tensors).context("the lists of a block mask")?;
        return draw(args, dims, Some(Table::new(dims, form, lists)));
    }
    let batch = match &args.block_mask {
        Some(BlockMaskArg::Prefixes(prefixes)) => prefixes.len(),
        _ => args.batch_entry.saturating_add(1),
    };
    let dims = Dims::new(batch, args.seqlen_q, args.head.saturating_add(1), 1)
        .with_seqlen_kv(args.seqlen_kv.unwrap_or(args.seqlen_q));
    let pairs = [batch, dims.heads_q, dims.seqlen_q, dims.seqlen_kv].into_iter().try_fold(1usize, usize::checked_mul);
    ensure!(
        args.block_mask.is_none() || pairs.is_some_and(|pairs| pairs <= MOST_LISTED),
        "--block-mask takes up to 2^30 pairs of query and key, of all batch entries and heads up to the one that is drawn"
    );
    let lists = args.block_mask.as_ref().map(|kind| Lists::new(kind, dims, 0)).transpose()?.flatten();
    draw(args, dims, lists.as_ref().map(|lists| Table::new(dims, lists.form(), lists.borrowed())))
}

/// The sizes of a file's problem, and its lists.
fn of_file(path: &Path, mut input: TensorFile) -> Result<(Dims, BlockMask, Tensors)> {
    let name = path.display();
    let layout = input.layout()?.unwrap_or(FileLayout::Bshd);
    let shape = |tensor: &str| {
        let (_, shape) = input.tensor(tensor)?;
        let shape = <[usize; 4]>::try_from(shape).ok().map(|shape| logical(layout, shape));
        shape.with_context(|| format!("input {name}: tensor `{tensor}` has not 4 dimensions"))
    };
    let (q, k) = (shape("q")?, shape("k")?);
    let Some(form) = blocks::form(&input).with_context(|| format!("input {name}"))? else {
        bail!(
            "input {name}: no lists of a block mask; allowed: a file with them, as `hattn random --block-mask` writes it"
        );
    };
    let dims = Dims::new(q[0], q[1], q[2], 1).with_seqlen_kv(k[1]);
    let options = ForwardProblem::builder(DType::F32, dims).block_mask(Some(form));
    let problem = options.build().with_context(|| format!("input {name}"))?;
    let mut tensors = Tensors::new();
    for list in problem.operands().iter().filter(|operand| blocks::is_list(operand.slot())) {
        let is_full_list = !form.has_full_blocks() && !input.has(list.slot().name());
        if !is_full_list {
            input.check(list.slot().name(), DType::I32, list.shape(), list.axes())?;
            tensors.insert(list.slot(), input.read(list.slot().name(), DType::I32)?);
        }
    }
    Ok((dims, form, tensors))
}

/// Draws the packed sequences of a file: all queries and all keys, of which a query keeps some of its own sequence.
fn packed(args: &MaskArgs, path: &Path, mut input: TensorFile) -> Result<()> {
    let name = || format!("input {}", path.display());
    let rows = |tensor: &str| match *input.tensor(tensor)?.1 {
        [rows, heads, _] => anyhow::Ok([rows, heads]),
        ref other => {
            bail!("{}: tensor `{tensor}` has shape {other:?}; allowed: {}", name(), axes(FileLayout::Thd))
        }
    };
    let ([queries, heads], [keys, _]) = (rows("q")?, rows("k")?);
    let dims = Dims::new(sequences(&input)?, queries, heads, 1).with_seqlen_kv(keys);
    let options = ForwardProblem::builder(DType::F32, dims).packed(true);
    let used = [Slot::SequsedQ, Slot::SequsedKv].into_iter().filter(|slot| input.has(slot.name()));
    let options = used.fold(options, |options, slot| options.operand(slot, true));
    let problem = options.build().with_context(name)?;
    let mut tensors = Tensors::new();
    for list in problem.operands().iter().filter(|list| list.dtype() == DType::I32 && is_read(list)) {
        input.check(list.slot().name(), DType::I32, list.shape(), list.axes())?;
        tensors.insert(list.slot(), input.read(list.slot().name(), DType::I32)?);
    }
    let lengths = lengths(&tensors);
    lengths.check(&problem).with_context(name)?;
    let mask = args.mask.unwrap_or(Mask::causal());
    ensure!(queries.max(keys) <= MOST_PIXELS, "{queries} queries and {keys} keys; allowed: up to 2^26 of each");
    let mut kept = vec![0..0; queries];
    for [of_q, of_kv] in lengths.sequences(&problem) {
        let band = mask.band(of_q.len, of_kv.len);
        for query in 0..of_q.len {
            let (first, end) = band.keys(query, of_kv.len);
            kept[of_q.begin + query] = of_kv.begin + first..of_kv.begin + end;
        }
    }
    let what = format!("{mask} of {} packed sequences", dims.batch);
    let place = [args.batch_entry, args.head];
    ensure!(place == [0, 0], "--batch-entry and --head with packed sequences, which have no lists; allowed: neither");
    show(args, &Drawn { what, rows: Rows::Packed(kept), queries, keys, lists: None, place })
}

/// Whether a problem has an operand as an input.
fn is_read(operand: &Operand) -> bool {
    operand.access() == Access::Read && operand.presence() == Presence::Required
}

fn draw(args: &MaskArgs, dims: Dims, lists: Option<Table<'_>>) -> Result<()> {
    for (option, at, size) in [("--batch-entry", args.batch_entry, dims.batch), ("--head", args.head, dims.heads_q)] {
        ensure!(at < size, "{option} {at}; allowed: 0 to below {size}");
    }
    let default = if lists.is_some() { Mask::Full } else { Mask::causal() };
    show(args, &Drawn::new(args.mask.unwrap_or(default), dims, lists, [args.batch_entry, args.head]))
}

fn show(args: &MaskArgs, drawn: &Drawn<'_>) -> Result<()> {
    match &args.png {
        None => report::plain(&drawn.picture()),
        Some(path) => {
            let (queries, keys) = (drawn.queries, drawn.keys);
            let pixels = queries.checked_mul(keys).filter(|pixels| (1..=MOST_PIXELS).contains(pixels));
            ensure!(pixels.is_some(), "--png takes 1 to 2^26 pairs of query and key, not {queries} x {keys}");
            AtomicFile::create(path)?.finish(|writer| drawn.png(writer))?;
            report::line("written", path.display());
        }
    }
    Ok(())
}

/// The keys that a mask keeps for each query.
enum Rows {
    /// Of one sequence.
    Dense(Band),
    /// Of packed ones, by the query's number among all.
    Packed(Vec<Range<usize>>),
}

/// What is drawn: a mask, and lists of blocks where there are any.
struct Drawn<'a> {
    /// The mask, in words.
    what: String,
    rows: Rows,
    queries: usize,
    keys: usize,
    lists: Option<Table<'a>>,
    /// The batch entry, and the head.
    place: [usize; 2],
}

impl<'a> Drawn<'a> {
    fn new(mask: Mask, dims: Dims, lists: Option<Table<'a>>, place: [usize; 2]) -> Self {
        let (queries, keys) = (dims.seqlen_q, dims.seqlen_kv);
        let beside = if lists.is_some() { " and lists of blocks" } else { "" };
        let (what, rows) = (format!("{mask}{beside}"), Rows::Dense(mask.band(queries, keys)));
        Self { what, rows, queries, keys, lists, place }
    }

    /// How many of some keys a query keeps.
    fn kept(&self, query: usize, keys: Range<usize>) -> usize {
        let (first, end) = match &self.rows {
            Rows::Dense(band) => band.keys(query, self.keys),
            Rows::Packed(rows) => (rows[query].start, rows[query].end),
        };
        let (first, end) = (first.max(keys.start), end.min(keys.end));
        let [batch, head] = self.place;
        match &self.lists {
            _ if first >= end => 0,
            None => end - first,
            Some(lists) => lists.kept([batch, head, query], first..end),
        }
    }

    /// A row of text for each query, or for several: `#` where all pairs are kept, `+` where some are, `.` where none is.
    fn picture(&self) -> String {
        let Self { what, queries, keys, .. } = self;
        let (rows, columns) = (queries.div_ceil(MOST).max(1), keys.div_ceil(MOST).max(1));
        let kept: u64 = (0..*queries).map(|query| self.kept(query, 0..*keys) as u64).sum();
        let mut text = format!("{what}, {queries} queries, {keys} keys, {kept} pairs kept\n");
        if rows > 1 || columns > 1 {
            writeln!(text, "a character is {rows} queries and {columns} keys").expect("memory takes all");
        }
        for first_row in (0..*queries).step_by(rows) {
            let of_rows = first_row..(first_row + rows).min(*queries);
            for first_key in (0..*keys).step_by(columns) {
                let of_columns = first_key..(first_key + columns).min(*keys);
                let kept: usize = of_rows.clone().map(|query| self.kept(query, of_columns.clone())).sum();
                text.push(match kept {
                    0 => '.',
                    all if all == of_rows.len() * of_columns.len() => '#',
                    _ => '+',
                });
            }
            text.push('\n');
        }
        text
    }

    /// A picture in the format PNG, a pixel of one bit for each pair: 0 (black) where the query keeps the key.
    fn png(&self, writer: &mut dyn std::io::Write) -> std::io::Result<()> {
        // Both are at least 1, and together at most 2^26.
        let mut encoder = Encoder::new(writer, self.keys as u32, self.queries as u32);
        encoder.set_color(ColorType::Grayscale);
        encoder.set_depth(BitDepth::One);
        let mut pixels = Vec::with_capacity(self.queries * self.keys.div_ceil(8));
        for query in 0..self.queries {
            for first in (0..self.keys).step_by(8) {
                let keys = first..self.keys.min(first + 8);
                let hidden = keys.filter(|&key| self.kept(query, key..key + 1) == 0);
                pixels.push(hidden.map(|key| 1 << (7 - key % 8)).sum::<u8>());
            }
        }
        let mut writer = encoder.write_header()?;
        writer.write_image_data(&pixels)?;
        Ok(writer.finish()?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hopper_attention::OwnedBlockLists;
    use std::io::Cursor;

    fn drawn(mask: Mask, queries: usize, keys: usize) -> Drawn<'static> {
        Drawn::new(mask, Dims::new(1, queries, 1, 1).with_seqlen_kv(keys), None, [0, 0])
    }

    #[test]
    fn a_character_for_each_pair() {
        let text = drawn(Mask::chunked(3), 4, 5).picture();
        assert_eq!(text, "chunk 3, 4 queries, 5 keys, 8 pairs kept\n##...\n###..\n...#.\n...##\n");
        assert!(drawn(Mask::prefix(2), 2, 4).picture().ends_with(" kept\n###.\n####\n"));
        assert_eq!(drawn(Mask::Full, 0, 3).picture(), "full, 0 queries, 3 keys, 0 pairs kept\n");
    }

    #[test]
    fn long_sequences_are_drawn_smaller() {
        let text = drawn(Mask::causal(), 128, 192).picture();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[1], "a character is 2 queries and 3 keys");
        assert!(lines.len() == 66 && lines[2..].iter().all(|line| line.len() == 64), "{text}");
        assert!(lines[65].ends_with("#+"), "{text}");
    }

    #[test]
    fn a_pixel_for_each_pair_that_mask_and_lists_keep() {
        // Keys of the same remainder, in two heads of which the second is drawn, beside a causal mask.
        let dims = Dims::new(1, 131, 2, 1).with_seqlen_kv(300);
        let keep = |head: usize, q: usize, kv: usize| q % 3 == (kv + head) % 3 || (128..256).contains(&kv);
        let lists = OwnedBlockLists::from_predicate(dims, false, true, |_, head, q, kv| keep(head, q, kv)).unwrap();
        let table = Table::new(dims, lists.block_mask(), lists.as_lists());
        let drawn = Drawn::new(Mask::causal(), dims, Some(table), [0, 1]);
        let mut bytes = Vec::new();
        drawn.png(&mut bytes).unwrap();

        let mut reader = png::Decoder::new(Cursor::new(&bytes)).read_info().unwrap();
        let info = reader.info();
        assert_eq!(
            (info.width, info.height, info.bit_depth, info.color_type),
            (300, 131, BitDepth::One, ColorType::Grayscale)
        );
        let mut kept = 0;
        for q in 0..131 {
            let row = reader.next_row().unwrap().unwrap();
            for kv in 0..300 {
                let is_black = row.data()[kv / 8] >> (7 - kv % 8) & 1 == 0;
                assert_eq!(is_black, keep(1, q, kv) && kv <= q + 169, "query {q}, key {kv}");
                kept += usize::from(is_black);
            }
        }
        assert!(reader.next_row().unwrap().is_none());
        let first = drawn.picture();
        assert!(
            first.starts_with(&format!("causal and lists of blocks, 131 queries, 300 keys, {kept} pairs kept\n")),
            "{first}"
        );
    }
}
