//! Staging: a planned batch as the words that the device reads.

use inflight_backend::{HistoryInputs, RowState, SamplingRow, StepInputs};
use inflight_kv_cache::BlockTable;
use inflight_scheduler::{Batch, Row, RowInputs, Scheduler, SequenceId};

use crate::{
    engine::told,
    live_requests::{LiveRequest, LiveRequests},
    probes::ProbeInputs,
};

/// What a batch is staged into.
pub(crate) struct Staged<'a> {
    pub(crate) inputs: &'a mut StepInputs,
    pub(crate) history: &'a mut HistoryInputs,
    pub(crate) probes: &'a mut ProbeInputs,
}

/// Fills `staged` with `batch`. To be called before the scheduler's `advance`, which may take the
/// blocks of a sequence that ends with this batch. Gives the sequences that have late rows, in the
/// order of those.
///
/// Carry-over: a decode row whose token is still in flight gets the row of the previous batch's
/// outputs that the device must read it from.
pub(crate) fn stage(
    batch: &Batch,
    scheduler: &Scheduler,
    requests: &mut LiveRequests,
    staged: Staged<'_>,
) -> Vec<SequenceId> {
    let Staged { inputs, history, probes } = staged;
    inputs.clear();
    history.clear();
    probes.clear();
    let mut late = Vec::new();
    for row in &batch.rows {
        let request = requests.get_mut(row.id);
        if row.fresh {
            request.client.start();
        }
        if let Some(probe) = &mut request.probe {
            let prompt = &scheduler.tokens(row.id)[..row.prompt_len];
            probes.stage(probe, row, prompt, inputs.token_ids.len());
        }
        stage_tokens(row, scheduler, request, inputs);
        stage_row(row, scheduler, request, inputs);
        stage_history(row, scheduler, inputs, history);
        if row.samples {
            let late_row = request.is_late().then_some(to_word(late.len()));
            late.extend(late_row.map(|_| row.id));
            stage_sampling(row, request, late_row, inputs);
        }
    }
    late
}

/// Token ids, positions and places in the KV cache: one entry per token.
fn stage_tokens(row: &Row, scheduler: &Scheduler, request: &LiveRequest, inputs: &mut StepInputs) {
    match row.inputs {
        RowInputs::Known => stage_known(row, scheduler, inputs),
        RowInputs::Pending => {
            let carried = request.output_row.expect("a pending token has a row that yields it");
            inputs.token_ids.push(0);
            inputs.carry_over.push(i32::try_from(carried).expect("rows are few"));
        }
    }
    stage_places(row, scheduler, inputs);
}

fn stage_known(row: &Row, scheduler: &Scheduler, inputs: &mut StepInputs) {
    let tokens = &scheduler.tokens(row.id)[row.start..row.context_len];
    inputs.token_ids.extend_from_slice(tokens);
    inputs.carry_over.extend(std::iter::repeat_n(-1, row.len));
}

fn stage_places(row: &Row, scheduler: &Scheduler, inputs: &mut StepInputs) {
    let tables = scheduler.block_tables(row.id);
    for position in row.start..row.context_len {
        inputs.positions.push(to_word(position));
        inputs.slot_mapping.push(tables.first().slot(position));
    }
    for (group, table) in inputs.more_groups.iter_mut().zip(tables.others()) {
        group.slot_mapping.extend((row.start..row.context_len).map(|at| table.slot(at)));
    }
}

/// Fills `inputs` with a batch of which every token is sampled, and told: `targets[i]` follows
/// position `i`.
pub(crate) fn stage_scored(
    batch: &Batch,
    scheduler: &Scheduler,
    targets: &[u32],
    inputs: &mut StepInputs,
) {
    inputs.clear();
    for row in &batch.rows {
        stage_known(row, scheduler, inputs);
        stage_places(row, scheduler, inputs);
        stage_context(row, scheduler, None, inputs);
        for (target, position) in targets[row.start..row.context_len].iter().zip(row.start..) {
            inputs.sample_indices.push(to_word(inputs.sample_indices.len()));
            let told = told(*target, &mut inputs.bias);
            let position = to_word(position + 1);
            inputs.sampling.push(SamplingRow { position, top_logprobs: Some(1), ..told });
        }
    }
}

/// Bounds, block table and sampling state: one entry per row.
fn stage_row(row: &Row, scheduler: &Scheduler, request: &LiveRequest, inputs: &mut StepInputs) {
    let state_slot = request.sampling.needs_token_counts().then_some(row.state_slot.0);
    stage_context(row, scheduler, state_slot, inputs);
}

fn stage_context(
    row: &Row,
    scheduler: &Scheduler,
    state_slot: Option<u32>,
    inputs: &mut StepInputs,
) {
    inputs.row_starts.push(to_word(inputs.token_ids.len()));
    // Attention knows of what is in the cache alone; rotation is by true positions.
    let tables = scheduler.block_tables(row.id);
    inputs.context_lens.push(push_blocks(row, tables.first(), &mut inputs.blocks));
    inputs.block_starts.push(to_word(inputs.blocks.len()));
    for (group, table) in inputs.more_groups.iter_mut().zip(tables.others()) {
        group.context_lens.push(push_blocks(row, table, &mut group.blocks));
        group.block_starts.push(to_word(group.blocks.len()));
    }
    inputs.row_states.push(RowState {
        state_slot,
        prompt_len: to_word(row.prompt_len),
        fresh: row.fresh,
    });
}

/// Adds the blocks that a row's context lies in, and gives its length.
fn push_blocks(row: &Row, table: &BlockTable, blocks: &mut Vec<u32>) -> u32 {
    let num_kept = row.context_len - table.num_dropped();
    let num_blocks = num_kept.div_ceil(table.block_size());
    blocks.extend(table.blocks()[..num_blocks].iter().map(|block| block.0));
    to_word(num_kept)
}

/// Tokens that the row does not compute and that penalties must know of: counting them clears the
/// sampling state, so that the row itself goes on counting.
fn stage_history(
    row: &Row,
    scheduler: &Scheduler,
    inputs: &mut StepInputs,
    history: &mut HistoryInputs,
) {
    if row.num_uncounted > 0
        && let Some(state) = inputs.row_states.last_mut()
    {
        history.push(*state, &scheduler.tokens(row.id)[..row.num_uncounted]);
        state.fresh = false;
    }
}

/// How the row's token is drawn: one entry per sampled row.
fn stage_sampling(
    row: &Row,
    request: &mut LiveRequest,
    late_row: Option<u32>,
    inputs: &mut StepInputs,
) {
    request.output_row = Some(inputs.sample_indices.len());
    inputs.sample_indices.push(to_word(inputs.token_ids.len() - 1));
    let params = &request.sampling;
    let bias_start = inputs.bias.len();
    inputs.bias.extend_from_slice(&params.logit_bias);
    // Under a grammar the ban depends on what else may come: it is a late one.
    let is_short = row.context_len - row.prompt_len < request.min_tokens;
    if is_short && request.grammar.is_none() {
        let banned = request.stop_token_ids.iter().map(|&id| (id, f32::NEG_INFINITY));
        inputs.bias.extend(banned);
    }
    inputs.sampling.push(SamplingRow {
        state_slot: params.needs_token_counts().then_some(row.state_slot.0),
        temperature: params.temperature,
        top_k: params.top_k,
        top_p: params.top_p,
        min_p: params.min_p,
        repetition_penalty: params.repetition_penalty,
        presence_penalty: params.presence_penalty,
        frequency_penalty: params.frequency_penalty,
        seed: params.seed,
        position: to_word(row.context_len),
        top_logprobs: params.top_logprobs,
        bias_start: to_word(bias_start),
        bias_len: to_word(inputs.bias.len() - bias_start),
        late_row,
        typical_p: params.typical_p,
        top_n_sigma: params.top_n_sigma,
        xtc_probability: params.xtc_probability,
        xtc_threshold: params.xtc_threshold,
    });
}

fn to_word(value: usize) -> u32 {
    u32::try_from(value).expect("positions, tokens and blocks of a batch fit 32 bits")
}
