//! Who waits for a request's updates, and complains at once about a wrong one.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use inflight_engine::{FinishReason, SinkClosed, TokenSink, Update};

use super::expected::Expected;

/// What a request has yielded. Copies are handles to the same one.
#[derive(Clone)]
pub(crate) struct Client(Arc<Mutex<Received>>);

pub(crate) struct Received {
    expected: Expected,
    pub(crate) num_tokens: usize,
    /// Prompt tokens that others had computed.
    pub(crate) num_shared: usize,
    pub(crate) finish: Option<FinishReason>,
    /// It goes away when it has so many tokens.
    vanishes_after: Option<usize>,
    /// A planted bug: the final message is lost on its way.
    loses_final: bool,
    pub(crate) violation: Option<String>,
}

impl Client {
    pub(crate) fn new(expected: Expected, vanishes_after: Option<usize>) -> Self {
        Self(Arc::new(Mutex::new(Received {
            expected,
            num_tokens: 0,
            num_shared: 0,
            finish: None,
            vanishes_after,
            loses_final: false,
            violation: None,
        })))
    }

    pub(crate) fn lose_final(&self) {
        self.received().loses_final = true;
    }

    pub(crate) fn received(&self) -> MutexGuard<'_, Received> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Received {
    fn violate(&mut self, what: String) {
        self.violation.get_or_insert(what);
    }

    fn take_token(&mut self, token: u32) -> Result<(), SinkClosed> {
        let at = self.num_tokens;
        if self.finish.is_some() {
            self.violate("a token came after the final message".to_owned());
        }
        if self.vanishes_after.is_some_and(|most| at >= most) {
            return Err(SinkClosed);
        }
        match self.expected.tokens.get(at) {
            Some(&right) if right == token => {}
            Some(right) => self.violate(format!("token {at} is {token}, should be {right}")),
            None => self.violate(format!("token {at} came after the end")),
        }
        self.num_tokens += 1;
        Ok(())
    }

    fn take_final(&mut self, reason: FinishReason) {
        if self.loses_final {
            return;
        }
        if self.finish.is_some() {
            self.violate("a second final message came".to_owned());
        }
        let ended = matches!(reason, FinishReason::Stop { .. } | FinishReason::Length);
        if ended
            && (self.num_tokens, &reason) != (self.expected.tokens.len(), &self.expected.finish)
        {
            let (count, expected) = (self.num_tokens, &self.expected);
            let (right, most) = (expected.finish.clone(), expected.tokens.len());
            self.violate(format!("ended by {reason:?} at {count}, not by {right:?} at {most}"));
        }
        self.finish = Some(reason);
    }
}

impl TokenSink for Client {
    fn send(&mut self, update: Update) -> Result<(), SinkClosed> {
        let mut received = self.received();
        match update {
            Update::Prompt(_) => Ok(()),
            Update::Token(update) => {
                received.num_shared = update.num_cached_tokens;
                received.take_token(update.token)
            }
            Update::Finished(reason) => {
                received.take_final(reason);
                Ok(())
            }
        }
    }
}
