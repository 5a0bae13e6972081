//! Steps as a timeline file, written while the engine runs.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::{self, JoinHandle};

use anyhow::{Context, Result, anyhow};
use inflight_engine::StepRecord;
use inflight_observe::TimelineWriter;

/// Most records that wait to be written; more are lost, as the engine does not wait.
const MAX_WAITING_RECORDS: usize = 65_536;

/// Writes records on a thread of its own until all senders are gone.
pub(crate) struct TraceFile {
    path: PathBuf,
    writer: JoinHandle<io::Result<()>>,
}

impl TraceFile {
    /// Creates the file.
    pub(crate) fn create(path: &Path) -> Result<(Self, SyncSender<StepRecord>)> {
        let file =
            File::create(path).with_context(|| format!("--trace-file {}", path.display()))?;
        let (sender, records) = sync_channel(MAX_WAITING_RECORDS);
        let write = move || write_all(BufWriter::new(file), &records);
        let writer = thread::Builder::new().name("trace".to_owned()).spawn(write)?;
        Ok((Self { path: path.to_owned(), writer }, sender))
    }

    /// Waits until everything is written.
    pub(crate) fn finish(self) -> Result<()> {
        let written = self.writer.join().map_err(|_| anyhow!("the trace's writer panicked"))?;
        written.with_context(|| format!("--trace-file {}", self.path.display()))?;
        tracing::info!(path = %self.path.display(), "the timeline is written");
        Ok(())
    }
}

fn write_all(file: impl Write, records: &Receiver<StepRecord>) -> io::Result<()> {
    let mut writer = TimelineWriter::new(file)?;
    for record in records {
        writer.add(&record)?;
    }
    writer.finish().map(|_| ())
}
