//! Late inputs: what a row's draw needs of the token before, worked out during the forward pass.

use inflight_backend::LateWriter;
use inflight_scheduler::{Scheduler, SequenceId};

use crate::{
    Allowed, FinishReason,
    grammar_workers::{GrammarWorkers, Next, Progress},
    history,
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
    let mut bias = Vec::new();
    for (row, &id) in sequences.iter().enumerate() {
        let Some(request) = requests.find(id) else { continue };
        bias.clear();
        let tokens = scheduler.tokens(id);
        if let Some(dry) = &request.sampling.dry {
            dry.penalise(tokens, &mut bias);
        }
        history::ban_words(&request.sampling.bad_words, tokens, &mut bias);
        if let Some(Progress::Known(next)) = &request.grammar {
            let is_short = scheduler.num_generated(id) < request.min_tokens;
            let banned = if is_short { &request.stop_token_ids[..] } else { &[] };
            write_allowed(row, next, banned, writer, &mut bias);
        }
        if !bias.is_empty() {
            writer.bias(row, &bias);
        }
    }
}

/// What a grammar allows but the `banned` tokens. Where nothing else is left, they are allowed:
/// an output that is complete cannot go on.
fn write_allowed(
    row: usize,
    next: &Next,
    banned: &[u32],
    writer: &mut LateWriter<'_>,
    bias: &mut Vec<(u32, f32)>,
) {
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
        Ok(Allowed::All) => bias.extend(banned.iter().map(|token| (*token, f32::NEG_INFINITY))),
        Ok(Allowed::Nothing) | Err(_) => {}
    }
}
