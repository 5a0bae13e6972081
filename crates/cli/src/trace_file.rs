//! Steps as a timeline file: Chrome's trace event format, which Perfetto reads too.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::{self, JoinHandle};

use anyhow::{Context, Result, anyhow};
use inflight_engine::{Span, StepRecord};

/// Most records that wait to be written; more are lost, as the engine does not wait.
const MAX_WAITING_RECORDS: usize = 65_536;

/// The lanes of the timeline, from the top.
const LANES: [&str; 4] = ["host", "h2d", "compute", "d2h"];

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

fn write_all(mut file: impl Write, records: &Receiver<StepRecord>) -> io::Result<()> {
    write!(file, "[")?;
    for (index, lane) in LANES.iter().enumerate() {
        let comma = if index == 0 { "" } else { "," };
        write!(
            file,
            "{comma}\n{{\"name\":\"thread_name\",\"ph\":\"M\",\"pid\":1,\"tid\":{index},\
             \"args\":{{\"name\":\"{lane}\"}}}}"
        )?;
    }
    for record in records {
        write_record(&mut file, &record)?;
    }
    writeln!(file, "\n]")?;
    file.flush()
}

fn write_record(file: &mut impl Write, record: &StepRecord) -> io::Result<()> {
    let phases = [
        ("admit", 0, record.admit),
        ("plan", 0, record.plan),
        ("stage", 0, record.stage),
        ("launch", 0, record.launch),
        ("blocked", 0, record.blocked),
        ("collect", 0, record.collect),
        ("h2d", 1, record.h2d),
        ("compute", 2, record.compute),
        ("d2h", 3, record.d2h),
    ];
    let StepRecord { batch, num_rows, num_tokens, num_sampled, .. } = record;
    for (phase, lane, Span { start, end }) in phases {
        let (start_us, len_us) = (micros(start), micros(end.saturating_sub(start)));
        write!(
            file,
            ",\n{{\"name\":\"{phase} {batch}\",\"cat\":\"{phase}\",\"ph\":\"X\",\"pid\":1,\
             \"tid\":{lane},\"ts\":{start_us:.3},\"dur\":{len_us:.3},\"args\":{{\
             \"batch\":{batch},\"rows\":{num_rows},\"tokens\":{num_tokens},\
             \"sampled\":{num_sampled}}}}}"
        )?;
    }
    Ok(())
}

fn micros(time: std::time::Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn records_become_events() {
        let (sender, records) = sync_channel(4);
        let span = |start, end| Span {
            start: Duration::from_micros(start),
            end: Duration::from_micros(end),
        };
        let record = StepRecord {
            batch: 7,
            num_rows: 2,
            compute: span(1500, 4000),
            ..StepRecord::default()
        };
        sender.send(record).unwrap();
        drop(sender);
        let mut text = Vec::new();
        write_all(&mut text, &records).unwrap();
        let events: Vec<serde_json::Value> = serde_json::from_slice(&text).unwrap();
        assert_eq!(events.len(), LANES.len() + 9);
        let compute = events.iter().find(|event| event["cat"] == "compute").unwrap();
        assert_eq!(compute["name"], "compute 7");
        assert_eq!(compute["tid"], 2);
        assert_eq!((compute["ts"].as_f64(), compute["dur"].as_f64()), (Some(1500.0), Some(2500.0)));
        assert_eq!(compute["args"]["rows"], 2);
    }
}
