//! Q, K and V of files, such as those of a trained model's layer, in place of inputs that are drawn.
//!
//! Whoever reads the files hands their tensors over as [`FileTensors`]. [`Sweep::points_of`] makes the points. A point has
//! as many sequences as the sweep's tokens or batch ask for: those of the file, repeated in turn along the batch.

use std::sync::Arc;

use anyhow::{Context as _, Result, ensure};
use hopper_attention_verify::inputs::Input;

use crate::{Direction, HeadDims, InputFile, Point, PointMask, Precision, Sweep};

/// A tensor of a file.
#[derive(Clone, Debug, PartialEq)]
pub struct FileTensor {
    shape: [usize; 4],
    values: Vec<f32>,
}

impl FileTensor {
    /// Of shape `[batch, seqlen, heads, head_dim]`, and with its values in that order.
    ///
    /// # Errors
    /// When there are not as many values.
    pub fn new(shape: [usize; 4], values: Vec<f32>) -> Result<Self> {
        let count = shape.iter().try_fold(1_usize, |product, &size| product.checked_mul(size));
        ensure!(count == Some(values.len()), "{} values of a tensor of shape {shape:?}", values.len());
        Ok(Self { shape, values })
    }

    /// `[batch, seqlen, heads, head_dim]`.
    pub fn shape(&self) -> [usize; 4] {
        self.shape
    }

    /// All values, in the order of the shape.
    pub fn values(&self) -> &[f32] {
        &self.values
    }

    /// The row of a token and a head of a point's sequence: the file's sequences are repeated.
    pub(crate) fn row(&self, [sequence, token, head]: [usize; 3]) -> Option<&[f32]> {
        let [batch, seqlen, heads, head_dim] = self.shape;
        let start = (((sequence % batch.max(1)) * seqlen + token) * heads + head) * head_dim;
        self.values.get(start..start + head_dim)
    }
}

/// The tensors of a file, and what else it says of its problem.
#[derive(Clone, Debug, PartialEq)]
pub struct FileTensors {
    /// What its points say of it.
    pub file: InputFile,
    /// The masks that it is timed with.
    pub masks: Vec<PointMask>,
    /// Queries.
    pub q: FileTensor,
    /// Keys.
    pub k: FileTensor,
    /// Values.
    pub v: FileTensor,
    /// The gradient of the output, if the file has one. A backward draws one of normal numbers otherwise.
    pub d_o: Option<FileTensor>,
}

impl FileTensors {
    /// A tensor, if the file has it.
    pub fn tensor(&self, input: Input) -> Option<&FileTensor> {
        match input {
            Input::Q => Some(&self.q),
            Input::K => Some(&self.k),
            Input::V => Some(&self.v),
            Input::DO => self.d_o.as_ref(),
        }
    }

    /// The tensors that it has, with their names in files.
    pub fn tensors(&self) -> impl Iterator<Item = (&'static str, &FileTensor)> {
        let named = [("q", Input::Q), ("k", Input::K), ("v", Input::V), ("d_o", Input::DO)];
        named.into_iter().filter_map(|(name, input)| Some((name, self.tensor(input)?)))
    }

    /// The file of a point, if it is one of these.
    pub(crate) fn of<'a>(point: &Point, files: &'a [Arc<Self>]) -> Result<Option<&'a Self>> {
        let Some(file) = &point.file else { return Ok(None) };
        let found = files.iter().find(|other| other.file.name == file.name);
        Ok(Some(&**found.with_context(|| format!("the tensors of {} are not there", file.name))?))
    }
}

impl Sweep {
    /// The points of these files in place of those of the sweep's own sizes, masks and inputs. Passes, types, tokens, batch,
    /// softcap, ALiBi and filters are the sweep's.
    ///
    /// # Errors
    /// When two files have one name, heads do not divide, sizes are too large, types cannot be timed, or nothing is left.
    pub fn points_of(&self, files: &[Arc<FileTensors>]) -> Result<Vec<Point>> {
        ensure!(
            !self.dtypes.contains(&Precision::E4m3),
            "--input with --dtypes e4m3 is not timed; allowed: --dtypes bf16,f16"
        );
        for (place, FileTensors { file, .. }) in files.iter().map(|file| &**file).enumerate() {
            ensure!(
                files[..place].iter().all(|other| other.file.name != file.name),
                "--input: two files are called {}, and points are named after their files; allowed: other names",
                file.name
            );
        }
        let mut points = Vec::new();
        for &direction in &self.directions {
            for &dtype in &self.dtypes {
                for file in files {
                    for &mask in &file.masks {
                        points.push(Point { direction, dtype, ..self.point_of(file, mask) }.checked()?);
                    }
                }
            }
        }
        let all = points.len();
        points.retain(|point| self.filters.is_empty() || self.filters.iter().any(|filter| point.matches(filter)));
        ensure!(!points.is_empty(), "none of the {all} points of files fits --filter {}", self.filters.join(" "));
        Ok(points)
    }

    /// A forward in bf16 of a file.
    fn point_of(&self, file: &FileTensors, mask: PointMask) -> Point {
        let ([_, queries, heads_q, qk], [_, seqlen, heads_kv, vo]) = (file.q.shape, file.v.shape);
        let (causal, window) = mask.bounds();
        let batch = self.batch_of(file.file.sequences, queries.max(seqlen));
        let kind = (Direction::Fwd, Precision::Bf16);
        Point {
            causal,
            window,
            queries: (queries != seqlen).then_some(queries),
            softcap: self.softcap,
            alibi: self.alibi,
            bias: self.bias,
            file: Some(file.file.clone()),
            ..Point::plain(kind, [heads_q, heads_kv], HeadDims { qk, vo }, [batch, seqlen])
        }
    }

    /// Sequences of a point: those that were asked for, or as many as the sweep's tokens hold, in whole rounds of the file's.
    pub fn batch_of(&self, sequences: usize, seqlen: usize) -> usize {
        let rounds = self.tokens / seqlen.saturating_mul(sequences).max(1);
        self.batch.unwrap_or(sequences.saturating_mul(rounds.max(1)))
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::Scale;

    /// Two sequences of 5 queries and 7 keys, and two query heads on one KV head. The values are places in memory.
    pub(crate) fn tensors(name: &str) -> FileTensors {
        let tensor = |shape: [usize; 4]| {
            let count = shape.iter().product::<usize>();
            FileTensor::new(shape, (0..count).map(|x| (x % 11) as f32 / 8.0).collect()).expect("as many values")
        };
        FileTensors {
            file: InputFile { name: name.into(), sequences: 2, scale: Some(Scale(0.5)) },
            masks: vec![PointMask::Full, PointMask::Causal],
            q: tensor([2, 5, 2, 8]),
            k: tensor([2, 7, 1, 8]),
            v: tensor([2, 7, 1, 4]),
            d_o: None,
        }
    }

    #[test]
    fn points_have_the_sizes_of_their_files() {
        let files = [Arc::new(tensors("a")), Arc::new(tensors("b"))];
        let sweep = Sweep { directions: Direction::ALL.to_vec(), tokens: 50, ..Sweep::small() };
        let points = sweep.points_of(&files).expect("points");
        assert_eq!(points.len(), 2 * 2 * 2 * 2);
        // 50 tokens hold three rounds of two sequences of 7.
        assert_eq!(points[1].to_string(), "fwd/bf16/d8x4/causal/s5x7/b6/h2/kv1/a");
        assert_eq!(points[15].to_string(), "bwd/f16/d8x4/causal/s5x7/b6/h2/kv1/b");
        assert_eq!(points[0].problem().expect("a problem").softmax_scale(), 0.5);
        let batch = |sweep: &Sweep| sweep.points_of(&files).expect("points")[0].batch;
        assert_eq!(
            (batch(&Sweep { tokens: 1, ..sweep.clone() }), batch(&Sweep { batch: Some(3), ..sweep.clone() })),
            (2, 3)
        );
        let some = Sweep { filters: vec!["b/causal/f16".into()], ..sweep.clone() };
        assert_eq!(some.points_of(&files).expect("points").len(), 2);
        let refused =
            |sweep: Sweep, files: &[Arc<FileTensors>]| format!("{:#}", sweep.points_of(files).expect_err("refused"));
        let none = Sweep { filters: vec!["c".into()], ..sweep.clone() };
        assert_eq!(refused(none, &files), "none of the 16 points of files fits --filter c");
        let e4m3 = Sweep { dtypes: vec![Precision::E4m3], directions: vec![Direction::Fwd], ..sweep.clone() };
        assert!(refused(e4m3, &files).starts_with("--input with --dtypes e4m3 is not timed"));
        assert!(refused(sweep, &[files[0].clone(), files[0].clone()]).contains("two files are called a"));
    }

    #[test]
    fn sequences_are_repeated() {
        let tensor = tensors("a").k;
        let row = |at| tensor.row(at).expect("a row").to_vec();
        assert_eq!((row([0, 3, 0]), row([5, 1, 0])), (row([2, 3, 0]), row([1, 1, 0])));
        assert_eq!(row([1, 0, 0])[..], tensor.values()[7 * 8..8 * 8]);
        assert!(FileTensor::new([1, 2, 3, 4], vec![0.0; 23]).is_err());
        assert!(FileTensor::new([usize::MAX; 4], vec![]).is_err());
    }
}
