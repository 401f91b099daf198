//! Reading files. Of a safetensors file the header is checked whole before a tensor's bytes are read.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use hopper_attention::{DType, Tuning};
use safetensors::Dtype as FileDtype;
use safetensors::tensor::Metadata;

use crate::args::FileLayout;
use crate::values::Values;

/// The largest header that the format allows, in bytes.
const MAX_HEADER_BYTES: u64 = 100_000_000;

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
        let mut file = File::open(path).context("cannot be opened")?;
        let about = file.metadata().context("cannot be read")?;
        ensure!(!about.is_dir(), "a folder; allowed: a safetensors file");
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
        let mut header = vec![0; usize::try_from(header_bytes)?];
        file.read_exact(&mut header).context("cannot be read")?;
        let header: Metadata = serde_json::from_slice(&header).context("bad safetensors header")?;

        let want = header.data_len() as u64;
        let got = file_bytes - data_start;
        ensure!(got >= want, "truncated: {got} bytes of tensors, its header announces {want}");
        ensure!(got == want, "{} bytes past its last tensor; allowed: none", got - want);
        Ok(Self { path: path.into(), file, header, data_start })
    }

    /// The layout under `layout` in the file's metadata, if it names one.
    pub fn layout(&self) -> Result<Option<FileLayout>> {
        let Some(text) = self.header.metadata().as_ref().and_then(|metadata| metadata.get("layout")) else {
            return Ok(None);
        };
        let layouts = [FileLayout::Bshd, FileLayout::Bhsd, FileLayout::Thd];
        match layouts.into_iter().find(|layout| layout.name() == text.to_lowercase()) {
            Some(layout) => Ok(Some(layout)),
            None => bail!("input {}: metadata layout `{text}`; allowed: bshd, bhsd", self.path.display()),
        }
    }

    /// Whether there is a tensor of this name.
    pub fn has(&self, name: &str) -> bool {
        self.header.info(name).is_some()
    }

    /// A tensor's element type and its shape as the file has it.
    pub fn tensor(&self, name: &str) -> Result<(DType, &[usize])> {
        let Some(info) = self.header.info(name) else {
            let names = self.header.offset_keys();
            let found = if names.is_empty() { "none".into() } else { names.join(", ") };
            bail!("input {}: tensor `{name}` is missing; found: {found}", self.path.display());
        };
        let dtype = match info.dtype {
            FileDtype::BF16 => DType::BF16,
            FileDtype::F16 => DType::F16,
            FileDtype::F32 => DType::F32,
            other => {
                bail!("input {}: tensor `{name}` has dtype {other}; allowed: BF16, F16, F32", self.path.display())
            }
        };
        Ok((dtype, &info.shape))
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
        let mut values = Values::unwritten(found, shape)?;
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
    let load = || Ok::<_, anyhow::Error>(std::fs::read_to_string(path)?.parse()?);
    load().with_context(|| format!("tuning {}", path.display()))
}
