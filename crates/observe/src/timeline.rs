//! Steps as a timeline: Chrome's trace event format, which Perfetto reads too.

use std::io::{self, Write};
use std::time::Duration;

use inflight_engine::{LaunchKind, Span, StepRecord};

use crate::{Bubble, Bubbles};

/// The lanes of the timeline, from the top.
const LANES: [&str; 4] = ["host", "h2d", "compute", "d2h"];
/// The lane on which the device computes, or does not.
const COMPUTE: usize = 2;

/// Writes steps as they come, each bubble before the step that ended it.
///
/// # Source
/// "Trace Event Format", <https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU>
pub struct TimelineWriter<W: Write> {
    file: W,
    bubbles: Bubbles,
}

impl<W: Write> TimelineWriter<W> {
    /// Begins the file.
    ///
    /// # Errors
    /// As writing does.
    pub fn new(mut file: W) -> io::Result<Self> {
        write!(file, "[")?;
        for (index, lane) in LANES.iter().enumerate() {
            let comma = if index == 0 { "" } else { "," };
            write!(
                file,
                "{comma}\n{{\"name\":\"thread_name\",\"ph\":\"M\",\"pid\":1,\"tid\":{index},\
                 \"args\":{{\"name\":\"{lane}\"}}}}"
            )?;
        }
        Ok(Self { file, bubbles: Bubbles::default() })
    }

    /// Adds a step; steps come in order.
    ///
    /// # Errors
    /// As writing does.
    pub fn add(&mut self, record: &StepRecord) -> io::Result<()> {
        for bubble in self.bubbles.of(record) {
            self.add_bubble(bubble, record.batch)?;
        }
        let phases = [
            ("admit", 0, record.admit),
            ("plan", 0, record.plan),
            ("stage", 0, record.stage),
            ("launch", 0, record.launch),
            ("late", 0, record.late),
            ("blocked", 0, record.blocked),
            ("collect", 0, record.collect),
            ("h2d", 1, record.h2d),
            ("compute", COMPUTE, record.compute),
            ("d2h", 3, record.d2h),
        ];
        let StepRecord { batch, num_rows, num_tokens, num_sampled, allocated, .. } = record;
        let launched = launch_label(record.launched_as);
        for (phase, lane, span) in phases {
            let (start_us, len_us) = micros(span);
            write!(
                self.file,
                ",\n{{\"name\":\"{phase} {batch}\",\"cat\":\"{phase}\",\"ph\":\"X\",\"pid\":1,\
                 \"tid\":{lane},\"ts\":{start_us:.3},\"dur\":{len_us:.3},\"args\":{{\
                 \"batch\":{batch},\"rows\":{num_rows},\"tokens\":{num_tokens},\
                 \"sampled\":{num_sampled},\"launched_as\":\"{launched}\",\
                 \"allocated\":{allocated}}}}}"
            )?;
        }
        Ok(())
    }

    fn add_bubble(&mut self, bubble: Bubble, batch: u64) -> io::Result<()> {
        let (start_us, len_us) = micros(bubble.span);
        let cause = bubble.cause.name();
        write!(
            self.file,
            ",\n{{\"name\":\"bubble: {cause}\",\"cat\":\"bubble\",\"ph\":\"X\",\"pid\":1,\
             \"tid\":{COMPUTE},\"ts\":{start_us:.3},\"dur\":{len_us:.3},\"args\":{{\
             \"before_batch\":{batch},\"cause\":\"{cause}\"}}}}"
        )
    }

    /// Ends the file.
    ///
    /// # Errors
    /// As writing does.
    pub fn finish(mut self) -> io::Result<W> {
        writeln!(self.file, "\n]")?;
        self.file.flush()?;
        Ok(self.file)
    }
}

/// A way to launch, as timelines have it.
pub(crate) fn launch_label(kind: LaunchKind) -> &'static str {
    match kind {
        LaunchKind::NoGraphs => "operators",
        LaunchKind::Graph => "graph",
        LaunchKind::CapturedGraph => "captured graph",
        LaunchKind::WithoutGraph => "operators, no graph",
    }
}

/// Begin and length in microseconds.
fn micros(Span { start, end }: Span) -> (f64, f64) {
    let micros = |time: Duration| time.as_secs_f64() * 1e6;
    (micros(start), micros(end.saturating_sub(start)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_become_events_and_gaps_become_bubbles() {
        let span = |start, end| Span {
            start: Duration::from_micros(start),
            end: Duration::from_micros(end),
        };
        let record =
            |batch, compute| StepRecord { batch, num_rows: 2, compute, ..StepRecord::default() };
        let mut writer = TimelineWriter::new(Vec::new()).unwrap();
        writer.add(&record(7, span(1500, 4000))).unwrap();
        writer.add(&record(8, span(4020, 5000))).unwrap();
        let text = writer.finish().unwrap();

        let events: Vec<serde_json::Value> = serde_json::from_slice(&text).unwrap();
        assert_eq!(events.len(), LANES.len() + 2 * 10 + 1);
        let named = |name: &str| events.iter().find(|event| event["name"] == name).unwrap();
        let compute = named("compute 7");
        assert_eq!(compute["tid"], 2);
        assert_eq!((compute["ts"].as_f64(), compute["dur"].as_f64()), (Some(1500.0), Some(2500.0)));
        assert_eq!(compute["args"]["rows"], 2);
        let bubble = events.iter().find(|event| event["cat"] == "bubble").unwrap();
        assert_eq!((bubble["ts"].as_f64(), bubble["dur"].as_f64()), (Some(4000.0), Some(20.0)));
        assert_eq!(bubble["args"]["cause"], "device: between batches");
    }
}
