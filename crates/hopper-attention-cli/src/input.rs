//! Reading files. Of a safetensors file the header is checked whole before a tensor's bytes are read.

mod header;

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, bail, ensure};
use hopper_attention::{DType, Dropout, Tuning};
use hopper_attention_benches::memory;
use hopper_attention_benches::text::{self, excerpt};
use safetensors::Dtype as FileDtype;
use safetensors::tensor::Metadata;

use crate::args::{FileLayout, parse_dropout};
use crate::values::Values;

/// The largest header that the format allows, in bytes.
const MAX_HEADER_BYTES: u64 = 100_000_000;
/// A byte of a header may take so many while it is parsed: the entries of a map with short keys take the most.
const PARSED_BYTES: usize = 32;
/// So many names of tensors are listed where one is missing.
const LISTED: usize = 8;
/// A name, or another word of the file, is cut to so many characters in an error.
const LONGEST: usize = 60;

/// An open safetensors file whose header has been found consistent with its length.
pub struct TensorFile {
    path: PathBuf,
    file: File,
    header: Metadata,
    data_start: u64,
}

impl TensorFile {
    /// Opens a file and reads its header; an error names the file.
    pub fn open(path: &Path) -> Result<Self> {
        Self::parse(path).with_context(|| format!("input {}", path.display()))
    }

    fn parse(path: &Path) -> Result<Self> {
        let mut file = text::open(path)?;
        let about = file.metadata().context("cannot be read")?;
        let file_bytes = about.len();

        let mut prefix = [0; 8];
        ensure!(file_bytes >= 8, "not a safetensors file: {file_bytes} bytes, a header takes at least 8");
        file.read_exact(&mut prefix).context("cannot be read")?;
        let header_bytes = u64::from_le_bytes(prefix);
        ensure!(
            header_bytes <= MAX_HEADER_BYTES,
            "not a safetensors file: its first 8 bytes announce a header of {header_bytes} bytes; \
             allowed: up to {MAX_HEADER_BYTES}"
        );
        let data_start = 8 + header_bytes;
        ensure!(
            data_start <= file_bytes,
            "truncated or not a safetensors file: a header of {header_bytes} bytes in a file of {file_bytes}"
        );
        let header_bytes = usize::try_from(header_bytes)?;
        let mut header = memory::filled(header_bytes, 0)?;
        file.read_exact(&mut header).context("cannot be read")?;
        memory::probe(header_bytes * PARSED_BYTES).context("reading the header")?;
        let header = header::parse(&header).context("bad safetensors header")?;

        let want = header.data_len() as u64;
        let got = file_bytes - data_start;
        ensure!(got >= want, "truncated: {got} bytes of tensors, its header announces {want}");
        ensure!(got == want, "{} bytes past its last tensor; allowed: none", got - want);
        Ok(Self { path: path.into(), file, header, data_start })
    }

    /// Where the file is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What the file's metadata says under a key.
    pub fn metadata(&self, key: &str) -> Option<&str> {
        self.header.metadata().as_ref()?.get(key).map(String::as_str)
    }

    /// The layout under `layout` in the file's metadata, if it names one.
    pub fn layout(&self) -> Result<Option<FileLayout>> {
        let Some(text) = self.metadata("layout") else { return Ok(None) };
        let layouts = [FileLayout::Bshd, FileLayout::Bhsd, FileLayout::Thd];
        match layouts.into_iter().find(|layout| layout.name() == text.to_lowercase()) {
            Some(layout) => Ok(Some(layout)),
            None => bail!(
                "input {}: metadata layout `{}`; allowed: bshd, bhsd, thd",
                self.path.display(),
                excerpt(text, LONGEST)
            ),
        }
    }

    /// The probability of dropout under `dropout` in the file's metadata, if it has one.
    pub fn dropout(&self) -> Result<Option<Dropout>> {
        let Some(text) = self.metadata("dropout") else { return Ok(None) };
        parse_dropout(text)
            .map(Some)
            .map_err(|why| anyhow!("input {}: metadata {}", self.path.display(), excerpt(&why, LONGEST)))
    }

    /// Whether there is a tensor of this name.
    pub fn has(&self, name: &str) -> bool {
        self.header.info(name).is_some()
    }

    /// A tensor's element type and its shape as the file has it.
    pub fn tensor(&self, name: &str) -> Result<(DType, &[usize])> {
        let Some(info) = self.header.info(name) else {
            bail!("input {}: tensor `{name}` is missing; found: {}", self.path.display(), self.names());
        };
        let dtype = match info.dtype {
            FileDtype::BF16 => DType::BF16,
            FileDtype::F16 => DType::F16,
            FileDtype::F32 => DType::F32,
            FileDtype::I32 => DType::I32,
            other => {
                let is_list =
                    ["cu_seqlens", "seqused", "mask_", "full_block"].iter().any(|list| name.starts_with(list));
                let allowed = if is_list { "I32" } else { "BF16, F16, F32" };
                bail!("input {}: tensor `{name}` has dtype {other}; allowed: {allowed}", self.path.display())
            }
        };
        Ok((dtype, &info.shape))
    }

    /// The first names of what is in the file, and how many there are besides.
    fn names(&self) -> String {
        let mut names = self.header.offset_keys();
        names.sort_unstable();
        let shown: Vec<String> = names.iter().take(LISTED).map(|name| excerpt(name, LONGEST)).collect();
        match names.len() {
            0 => "none".into(),
            all if all > LISTED => format!("{} and {} more", shown.join(", "), all - LISTED),
            _ => shown.join(", "),
        }
    }

    /// Whether a tensor is there, of this type and shape, whose dimensions are called `axes`.
    pub fn check(&self, name: &str, dtype: DType, shape: &[usize], axes: &str) -> Result<()> {
        let (found, dims) = self.tensor(name)?;
        let input = self.path.display();
        ensure!(found == dtype, "input {input}: tensor `{name}` has dtype {found}; allowed: {dtype}");
        ensure!(dims == shape, "input {input}: tensor `{name}` has shape {dims:?}; allowed: {shape:?}, {axes}");
        Ok(())
    }

    /// Reads a tensor, as another type where that is wanted.
    pub fn read(&mut self, name: &str, dtype: DType) -> Result<Values> {
        let (found, shape) = self.tensor(name)?;
        let mut values = Values::unwritten(found, shape)
            .with_context(|| format!("input {}: tensor `{name}`", self.path.display()))?;
        // The header's checks tie the offsets to shape and type.
        let begin = self.header.info(name).map_or(0, |info| info.data_offsets.0);
        self.file
            .seek(SeekFrom::Start(self.data_start + begin as u64))
            .and_then(|_| self.file.read_exact(values.bytes_mut()))
            .with_context(|| format!("input {}: tensor `{name}` cannot be read", self.path.display()))?;
        values.converted(dtype)
    }
}

/// Reads what `hattn tune` wrote.
pub fn tuning(path: &Path) -> Result<Tuning> {
    let load = || Ok::<_, anyhow::Error>(text::read(path)?.parse()?);
    load().with_context(|| format!("tuning {}", path.display()))
}
