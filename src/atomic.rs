//! Files that appear whole or not at all: written to a temporary name beside the target, synced, renamed.
//!
//! The temporary names in use are kept in a list, so that an interrupted program can remove them.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

static OPEN: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

fn open() -> std::sync::MutexGuard<'static, Vec<PathBuf>> {
    // A panic while the list is held leaves a list of names, which is never in a half-changed state.
    OPEN.lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// Writes `bytes` to `path`.
///
/// # Errors
/// When the directory cannot be written; the target is then what it was.
pub fn write(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let mut file = AtomicFile::create(path)?;
    file.write_all(bytes)?;
    file.commit()
}

/// A file under a temporary name; dropped without [`commit`](AtomicFile::commit), it vanishes.
#[derive(Debug)]
pub struct AtomicFile {
    file: std::io::BufWriter<std::fs::File>,
    temporary: PathBuf,
    target: PathBuf,
    done: bool,
}

impl AtomicFile {
    /// Opens a temporary file beside `target`.
    ///
    /// # Errors
    /// When the directory cannot be written.
    pub fn create(target: &Path) -> std::io::Result<AtomicFile> {
        let mut name = target
            .file_name()
            .map(std::ffi::OsStr::to_owned)
            .unwrap_or_default();
        name.push(format!(".{}.tmp", std::process::id()));
        let temporary = target.with_file_name(name);
        if target.is_dir() {
            return Err(std::io::Error::new(
                std::io::ErrorKind::IsADirectory,
                "found a directory, expected a file name",
            ));
        }
        open().push(temporary.clone());
        match std::fs::File::create(&temporary) {
            Ok(file) => Ok(AtomicFile {
                file: std::io::BufWriter::new(file),
                temporary,
                target: target.to_owned(),
                done: false,
            }),
            Err(error) => {
                open().retain(|path| *path != temporary);
                Err(error)
            }
        }
    }

    /// Syncs and renames: from here on the target is the new file.
    ///
    /// # Errors
    /// When the disk is full or the target cannot be replaced.
    pub fn commit(mut self) -> std::io::Result<()> {
        self.file.flush()?;
        self.file.get_ref().sync_all()?;
        std::fs::rename(&self.temporary, &self.target)?;
        self.done = true;
        Ok(())
    }
}

impl Write for AtomicFile {
    fn write(&mut self, buffer: &[u8]) -> std::io::Result<usize> {
        self.file.write(buffer)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.file.flush()
    }
}

impl Drop for AtomicFile {
    fn drop(&mut self) {
        if !self.done {
            // Nothing more can be done where even removing fails; the name ends in .tmp and readers pass over it.
            let _ = std::fs::remove_file(&self.temporary);
        }
        open().retain(|path| *path != self.temporary);
    }
}

/// Removes the temporary files of all writes under way; for a program that is about to end at once.
pub fn remove_open_files() {
    for path in open().drain(..) {
        let _ = std::fs::remove_file(path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dropped_file_leaves_nothing_and_keeps_the_old_target() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("report.json");
        write(&path, b"old").unwrap();
        let mut file = AtomicFile::create(&path).unwrap();
        file.write_all(b"half").unwrap();
        drop(file);
        assert_eq!(std::fs::read(&path).unwrap(), b"old");
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_directory_is_refused_as_a_target() {
        let directory = tempfile::tempdir().unwrap();
        assert!(write(directory.path(), b"x").is_err());
    }
}
