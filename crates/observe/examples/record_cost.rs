//! What recording a step costs: on the engine's thread, and on the recorder's own.
//!
//! ```text
//! cargo run --release -p inflight-observe --example record_cost
//! ```
//! The engine's thread reads its clock twelve times, writes down the rows, and sends a copy. On a
//! GPU six driver calls for event times come on top, which this cannot measure.

use std::hint::black_box;
use std::sync::mpsc::sync_channel;
use std::time::{Duration, Instant};

use inflight_engine::{RequestId, RowKind, RowRecord, Span, StepRecord};
use inflight_observe::StepRecorder;

const NUM_STEPS: u32 = 20_000;
/// Readings of the clock: begin and end of admit, plan, stage, launch, blocked and collect.
const NUM_READINGS: usize = 12;

fn main() {
    println!("{:>6} {:>22} {:>24}", "rows", "engine's thread, us", "recorder's thread, us");
    for num_rows in [1, 32, 256] {
        let (engine, recorder) = (engine_side(num_rows), recorder_side(num_rows));
        let micros = |time: Duration| time.as_secs_f64() * 1e6 / f64::from(NUM_STEPS);
        println!("{num_rows:6} {:22.3} {:24.3}", micros(engine), micros(recorder));
    }
}

fn rows(num_rows: usize) -> impl Iterator<Item = RowRecord> {
    (0..num_rows).map(|i| RowRecord {
        id: RequestId(i as u64),
        kind: RowKind::Decode,
        start: 100 + i,
        len: 1,
        is_fresh: false,
    })
}

/// One step's record, with all that is read and copied for it.
fn record(batch: u64, num_rows: usize, origin: Instant) -> StepRecord {
    let mut times = [Duration::ZERO; NUM_READINGS];
    times.iter_mut().for_each(|time| *time = origin.elapsed());
    let span = |i: usize| Span { start: times[2 * i], end: times[2 * i + 1] };
    StepRecord {
        batch,
        num_rows,
        num_tokens: num_rows,
        rows: rows(num_rows).collect(),
        admit: span(0),
        plan: span(1),
        stage: span(2),
        launch: span(3),
        blocked: span(4),
        collect: span(5),
        compute: Span { start: times[7], end: times[9] },
        ..StepRecord::default()
    }
}

/// The receiver is drained now and then, outside the time, as its thread would do it.
fn engine_side(num_rows: usize) -> Duration {
    let (sender, receiver) = sync_channel(1024);
    let (origin, mut spent) = (Instant::now(), Duration::ZERO);
    for batch in 0..NUM_STEPS {
        let started = Instant::now();
        let record = record(u64::from(batch) + 1, num_rows, origin);
        // As the engine does it for each of those who listen.
        let _ = black_box(sender.try_send(record.clone()));
        drop(record);
        spent += started.elapsed();
        if batch % 64 == 0 {
            receiver.try_iter().for_each(drop);
        }
    }
    spent
}

fn recorder_side(num_rows: usize) -> Duration {
    let (recorder, origin) = (StepRecorder::default(), Instant::now());
    let mut spent = Duration::ZERO;
    for batch in 0..NUM_STEPS {
        let record = record(u64::from(batch) + 1, num_rows, origin);
        let started = Instant::now();
        recorder.add(record);
        spent += started.elapsed();
    }
    black_box(recorder.totals());
    spent
}
