//! Writing files so that a reader sees the old file or the whole new one, never a part.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::io::{BufWriter, ErrorKind, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, bail, ensure};
use serde_json::json;
use tempfile::{Builder, NamedTempFile};

use crate::signals::{Listed, removed_by_signals};

/// As many symbolic links may lead to an output, one to the next; Linux has the same limit.
const MAX_LINKS: usize = 40;

/// A file that appears under its name, complete, at [`finish`](Self::finish), and leaves nothing behind otherwise.
///
/// It is made before the work whose result it will hold, so that an output that cannot be written costs no work.
pub struct AtomicFile {
    path: PathBuf,
    temporary: NamedTempFile,
    listed: Listed,
}

impl AtomicFile {
    /// Makes a temporary file in the folder of `path`; an error names the output.
    pub fn create(path: &Path) -> Result<Self> {
        Self::make(path).with_context(|| format!("output {}", path.display()))
    }

    fn make(path: &Path) -> Result<Self> {
        // `folder/` and `folder/.` would end in a name too, but nothing can be renamed to them.
        let named = |name: &OsStr| path.as_os_str().as_encoded_bytes().ends_with(name.as_encoded_bytes());
        ensure!(
            path.file_name().is_some_and(named),
            "not a file name; allowed: a file in a folder that can be written"
        );
        let path = followed(path)?;
        let old = match path.metadata() {
            Err(error) if error.kind() == ErrorKind::NotFound => None,
            about => Some(about.context("cannot be written")?),
        };
        if let Some(about) = &old {
            ensure!(!about.is_dir(), "a folder; allowed: a file name");
            ensure!(about.is_file(), "not a regular file; allowed: a regular file or a new name");
            ensure!(!about.permissions().readonly(), "read-only; allowed: a file that can be written, or a new name");
        }
        let folder = match path.parent() {
            Some(folder) if !folder.as_os_str().is_empty() => folder,
            _ => Path::new("."),
        };
        let mut builder = Builder::new();
        builder.prefix(".hattn-").suffix(".part");
        // A new file has what a plain `File::create` would ask for; the user's umask takes its part away.
        #[cfg(unix)]
        let new = std::os::unix::fs::PermissionsExt::from_mode(0o666);
        #[cfg(unix)]
        builder.permissions(old.as_ref().map_or(new, std::fs::Metadata::permissions));
        let (temporary, listed) = removed_by_signals(|| builder.tempfile_in(folder)).map_err(|error| {
            // Without the path of the temporary file, which the user never asked for.
            let text = error.to_string();
            anyhow!("cannot be written: {}", text.rsplit_once(" at path ").map_or(text.as_str(), |(words, _)| words))
        })?;
        if let Some(about) = old {
            // The umask took its part of these too.
            temporary.as_file().set_permissions(about.permissions()).context("its permissions cannot be kept")?;
        }
        Ok(Self { path, temporary, listed })
    }

    /// Fills the file with `write` and gives it its name.
    pub fn finish(self, write: impl FnOnce(&mut dyn Write) -> std::io::Result<()>) -> Result<()> {
        let Self { path, temporary, listed } = self;
        let fill = || {
            let mut writer = BufWriter::with_capacity(1 << 20, temporary.as_file());
            write(&mut writer)?;
            writer.flush()?;
            temporary.as_file().sync_all()
        };
        fill().with_context(|| format!("output {} cannot be written", path.display()))?;
        temporary
            .persist(&path)
            .map_err(|error| error.error)
            .with_context(|| format!("output {} cannot be put in place", path.display()))?;
        drop(listed); // not before the file has its name
        Ok(())
    }
}

/// Where symbolic links lead, be there a file or none yet. The rename must replace what the last of them leads to, not a link.
fn followed(path: &Path) -> Result<PathBuf> {
    let mut path = path.to_path_buf();
    for _ in 0..MAX_LINKS {
        // What is no link has no target: a file, or nothing yet.
        let Ok(target) = path.read_link() else { return Ok(path) };
        path = path.parent().unwrap_or(Path::new("")).join(target);
    }
    bail!("more than {MAX_LINKS} symbolic links, one to the next; allowed: up to {MAX_LINKS}")
}

/// A tensor to write.
pub struct NamedTensor<'a> {
    /// Its key in the file.
    pub name: &'a str,
    /// The name of its element type: bf16, f16, f32, i32 or u8.
    pub dtype: &'static str,
    /// Its shape in the file.
    pub shape: Vec<usize>,
    /// Its values in C order, little-endian.
    pub bytes: &'a [u8],
}

/// Writes a safetensors file. The crate keeps metadata in a hash map, so two of its files seldom agree byte for byte;
/// here the same tensors and metadata give the same file.
pub fn write_safetensors(
    writer: &mut dyn Write,
    metadata: &BTreeMap<String, String>,
    tensors: &[NamedTensor],
) -> std::io::Result<()> {
    let mut header = serde_json::Map::new();
    header.insert("__metadata__".into(), json!(metadata));
    let mut offset = 0;
    for tensor in tensors {
        let end = offset + tensor.bytes.len();
        let dtype = tensor.dtype.to_uppercase();
        header
            .insert(tensor.name.into(), json!({"dtype": dtype, "shape": tensor.shape, "data_offsets": [offset, end]}));
        offset = end;
    }
    let mut header = serde_json::to_vec(&header)?;
    header.resize(header.len().next_multiple_of(8), b' ');
    writer.write_all(&(header.len() as u64).to_le_bytes())?;
    writer.write_all(&header)?;
    tensors.iter().try_for_each(|tensor| writer.write_all(tensor.bytes))
}
