//! A batch's answers as the files that clients fetch: those that are good, and errors.

use std::fs::File;
use std::io::{self, BufRead, BufReader, BufWriter, Write};
use std::path::PathBuf;

use serde::Deserialize;

use super::object::{Batch, Counts};
use crate::files::FileStore;
use crate::files::object::Purpose;

/// What became of a batch's lines.
#[derive(Debug, Default)]
pub(super) struct Parted {
    pub(super) output_file_id: Option<String>,
    pub(super) error_file_id: Option<String>,
    /// Those that were answered; the total is another's to know.
    pub(super) counts: Counts,
}

#[derive(Deserialize)]
struct Answered {
    response: Option<Response>,
}

#[derive(Deserialize)]
struct Response {
    status_code: u16,
}

/// Makes files of what a batch has been answered so far. Done again it makes the same ones.
///
/// # Errors
/// A file cannot be read or written.
pub(super) fn split(store: &FileStore, batch: &Batch, owner: Option<&str>) -> io::Result<Parted> {
    let answers = match File::open(store.data_path(&batch.id)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Parted::default()),
        answers => BufReader::new(answers?),
    };
    let mut outputs = Pile::new(store, batch, "output")?;
    let mut errors = Pile::new(store, batch, "error")?;
    for line in answers.lines() {
        let line = line?;
        // What a batch that was cut short leaves last may be torn.
        let Ok(answered) = serde_json::from_str::<Answered>(&line) else { continue };
        let is_ok = answered.response.is_some_and(|response| response.status_code == 200);
        let pile = if is_ok { &mut outputs } else { &mut errors };
        pile.num_lines += 1;
        writeln!(pile.file, "{line}")?;
    }
    let counts = Counts { total: 0, completed: outputs.num_lines, failed: errors.num_lines };
    let output_file_id = outputs.keep(store, owner)?;
    Ok(Parted { output_file_id, error_file_id: errors.keep(store, owner)?, counts })
}

/// A file that is being written.
struct Pile {
    path: PathBuf,
    file: BufWriter<File>,
    id: String,
    filename: String,
    num_lines: u64,
}

impl Pile {
    fn new(store: &FileStore, batch: &Batch, what: &str) -> io::Result<Self> {
        let name = batch.id.trim_start_matches("batch_");
        let id = format!("file-{what}-{name}");
        let path = store.part_path(&id);
        let filename = format!("{}_{what}.jsonl", batch.id);
        let file = BufWriter::new(File::create(&path)?);
        Ok(Self { path, file, id, filename, num_lines: 0 })
    }

    /// Its id; `None`: nothing was written.
    fn keep(self, store: &FileStore, owner: Option<&str>) -> io::Result<Option<String>> {
        let file = self.file.into_inner().map_err(io::IntoInnerError::into_error)?;
        if self.num_lines == 0 {
            std::fs::remove_file(&self.path)?;
            return Ok(None);
        }
        file.sync_data()?;
        let owner = owner.map(str::to_owned);
        store.keep(&self.path, self.id.clone(), Purpose::BatchOutput, self.filename, owner)?;
        Ok(Some(self.id))
    }
}
