//! Holds an engine until all requests are there.

use std::sync::mpsc::{self, Receiver, Sender};

use anyhow::{Context, Result};
use inflight_engine::{EngineHandle, RequestSpec, SinkClosed, TokenSink, Update};

/// Holds the engine between two steps until everything was submitted, so that its first step sees
/// all requests: with overlap on and off they then meet the same schedule.
///
/// It is a request of one token whose final message does not return. No product may do that; here
/// nobody else waits.
pub(crate) struct Gate {
    open: Sender<()>,
}

struct GateSink {
    reached: Sender<()>,
    opened: Receiver<()>,
}

impl Gate {
    /// Returns when the engine stands at the gate.
    pub(crate) fn close(handle: &EngineHandle) -> Result<Self> {
        let spec = RequestSpec { prompt: vec![0], max_tokens: Some(1), ..RequestSpec::default() };
        let (reached, is_reached) = mpsc::channel();
        let (open, opened) = mpsc::channel();
        let sink = GateSink { reached, opened };
        handle.submit(handle.limits().validate(spec)?, Box::new(sink))?;
        is_reached.recv().context("the engine stopped while it warmed up")?;
        Ok(Self { open })
    }

    pub(crate) fn open(self) -> Result<()> {
        self.open.send(()).context("the engine stopped while requests were submitted")
    }
}

impl TokenSink for GateSink {
    fn send(&mut self, update: Update) -> Result<(), SinkClosed> {
        if let Update::Finished(_) = update {
            // A gate that nobody opens any more is open.
            let _ = self.reached.send(()).map(|()| self.opened.recv());
        }
        Ok(())
    }
}
