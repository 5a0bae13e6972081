//! All lines of a batch, many at a time.

use std::path::Path;
use std::time::{Duration, Instant};

use futures_util::stream::{FuturesUnordered, StreamExt};

use super::error::BatchError;
use super::files::{Input, Numbered, Output};
use super::line::{Answer, Asker, OutputLine};
use crate::access::Bearer;
use crate::serve::router;
use crate::state::ServerState;

/// How soon a line that found no room is tried again.
const RETRY_AFTER: Duration = Duration::from_millis(200);
/// Time after which what was written is certainly on the disk.
const SYNC_EVERY: Duration = Duration::from_secs(1);
/// A line has its request's body and little else.
const LINE_OVERHEAD: usize = 4096;

/// A batch that is being run.
pub struct BatchRun {
    asker: Asker,
    input: Input,
    output: Output,
    max_at_once: usize,
    progress: BatchProgress,
}

/// How far a batch is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BatchProgress {
    /// Lines of the input.
    pub num_lines: u64,
    /// Those that an earlier run has answered.
    pub num_found: u64,
    /// Those answered, these included.
    pub num_answered: u64,
    /// Those whose answer, by this run, is an error.
    pub num_failed: u64,
}

impl BatchRun {
    /// Opens the files. Lines of `input` that `output` has answers of are not asked again.
    ///
    /// # Errors
    /// A file cannot be opened, or `output` belongs to something else.
    pub fn open(
        state: &ServerState,
        input: &Path,
        output: &Path,
        max_at_once: usize,
    ) -> Result<Self, BatchError> {
        // First what must be there: nothing is made for an input that is not.
        std::fs::metadata(input)
            .map_err(|error| BatchError::File { path: input.display().to_string(), error })?;
        let (output, answered) = Output::open(output)?;
        let num_found = answered.len() as u64;
        let (input, num_lines) = Input::open(input, max_line_bytes(state), answered)?;
        let num_answered = num_found;
        let progress = BatchProgress { num_lines, num_found, num_answered, num_failed: 0 };
        let asker = Asker {
            state: state.clone(),
            router: router(state.clone()),
            bearer: Bearer::default(),
        };
        Ok(Self { asker, input, output, max_at_once, progress })
    }

    /// Has all lines asked by somebody.
    pub(crate) fn on_behalf_of(mut self, bearer: Bearer) -> Self {
        self.asker.bearer = bearer;
        self
    }

    /// How far it is.
    pub fn progress(&self) -> BatchProgress {
        self.progress
    }

    /// Answers all lines; `show` is told after each. Answers are written as they come.
    ///
    /// # Errors
    /// A file fails, or the engine ends.
    pub async fn run(
        mut self,
        mut show: impl FnMut(BatchProgress),
    ) -> Result<BatchProgress, BatchError> {
        let mut running = FuturesUnordered::new();
        let (mut is_at_end, mut synced) = (false, Instant::now());
        loop {
            while !is_at_end && running.len() < self.max_at_once {
                match self.input.next()? {
                    Some(line) => running.push(answer(line, self.asker.clone())),
                    None => is_at_end = true,
                }
            }
            let Some(answered) = running.next().await else { break };
            let line = answered?;
            self.output.write(&line)?;
            self.progress.num_answered += 1;
            self.progress.num_failed += u64::from(!line.is_ok());
            show(self.progress);
            if synced.elapsed() >= SYNC_EVERY {
                self.output.sync()?;
                synced = Instant::now();
            }
        }
        self.output.sync()?;
        Ok(self.progress)
    }
}

/// Longest line that is read.
pub(super) fn max_line_bytes(state: &ServerState) -> usize {
    state.config().max_body_bytes + LINE_OVERHEAD
}

async fn answer(line: Numbered, asker: Asker) -> Result<OutputLine, BatchError> {
    let Numbered { number, line } = line;
    let line = match line {
        Ok(line) => line,
        Err(refused) => return Ok(*refused),
    };
    loop {
        match line.answer(number, &asker).await {
            Answer::Written(line) => return Ok(line),
            Answer::QueueFull => tokio::time::sleep(RETRY_AFTER).await,
            Answer::EngineEnded => return Err(BatchError::EngineEnded),
        }
    }
}
