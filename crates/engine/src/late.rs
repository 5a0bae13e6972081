//! Late inputs: what a row's draw needs of the token before, worked out during the forward pass.

use inflight_backend::LateWriter;
use inflight_scheduler::{Scheduler, SequenceId};

use crate::{
    Allowed, FinishReason,
    grammar_workers::{GrammarWorkers, Next, Progress},
    live_requests::{LiveRequest, LiveRequests},
};

/// Waits until it is known what each of `sequences` may draw next. Gives those that end instead,
/// and why.
///
/// Every token before those to be drawn must have been committed.
pub(crate) fn settle(
    sequences: &[SequenceId],
    scheduler: &Scheduler,
    requests: &mut LiveRequests,
    workers: &GrammarWorkers,
) -> Vec<(SequenceId, FinishReason)> {
    let mut ended = Vec::new();
    for &id in sequences {
        // A stray row's request may be gone.
        while requests.find(id).is_some_and(|request| request.is_worked_on()) {
            let (of, next) = workers.wait();
            if let Some(request) = requests.find(of) {
                request.grammar = Some(Progress::Known(next));
            }
        }
        let Some(LiveRequest { grammar: Some(Progress::Known(next)), .. }) = requests.find(id)
        else {
            continue;
        };
        match &next.allowed {
            Ok(Allowed::All | Allowed::Masked) => {}
            Ok(Allowed::Nothing) => {
                let token = *scheduler.tokens(id).last().expect("a prompt is never empty");
                ended.push((id, FinishReason::Stop { token }));
            }
            Err(reason) => ended.push((id, FinishReason::Failed(reason.clone()))),
        }
    }
    ended
}

/// Writes the late row of each of `sequences`; those that have ended may draw anything, since what
/// they draw is dropped.
pub(crate) fn write(
    sequences: &[SequenceId],
    scheduler: &Scheduler,
    requests: &mut LiveRequests,
    writer: &mut LateWriter<'_>,
) {
    for (row, &id) in sequences.iter().enumerate() {
        let Some(request) = requests.find(id) else { continue };
        let banned = match scheduler.num_generated(id) < request.min_tokens {
            true => &request.stop_token_ids[..],
            false => &[],
        };
        if let Some(Progress::Known(next)) = &request.grammar {
            write_allowed(row, next, banned, writer);
        }
    }
}

/// What a grammar allows but the `banned` tokens. Where nothing else is left, they are allowed:
/// an output that is complete cannot go on.
fn write_allowed(row: usize, next: &Next, banned: &[u32], writer: &mut LateWriter<'_>) {
    match next.allowed {
        Ok(Allowed::Masked) => {
            if banned.is_empty() {
                return writer.mask(row, &next.mask);
            }
            let mut mask = next.mask.clone();
            for token in banned {
                if let Some(word) = mask.get_mut(*token as usize / 32) {
                    *word &= !(1 << (token % 32));
                }
            }
            let is_empty = mask.iter().all(|word| *word == 0);
            writer.mask(row, if is_empty { &next.mask } else { &mask });
        }
        Ok(Allowed::All) => {
            let bias = banned.iter().map(|token| (*token, f32::NEG_INFINITY));
            writer.bias(row, &bias.collect::<Vec<_>>());
        }
        Ok(Allowed::Nothing) | Err(_) => {}
    }
}
