//! `inflight bench`: measure.
//!
//! Reading order: [`offline`] (many requests through an engine in this process), [`asynchrony`]
//! (the same with overlap on and off), [`batching`] (what batching gains), [`chats`] (chats that
//! come back), [`text`] (how well a model predicts one), [`recall`] (what it finds again in a long
//! prompt), [`kernels`] (every operator alone), [`recorder`] (what recording costs), [`serve`] (any
//! server under load), [`compare`] (two files of figures), [`constraint`] (a grammar to hold
//! outputs to), [`outputs`] (where figures go), [`run_plots`], [`batching_plots`].

mod asynchrony;
mod batching;
mod batching_plots;
mod chats;
mod compare;
mod constraint;
mod kernels;
mod offline;
pub(crate) mod outputs;
mod recall;
mod recorder;
mod run_plots;
mod serve;
mod text;

use anyhow::Result;
use inflight_engine::EngineConfig;
use inflight_model::ModelFiles;
use serde_json::{Value, json};

use crate::args::{BenchCommand, EngineArgs, MeasuredModel};
use crate::models::ModelArgument;
use crate::progress::is_watched;
use crate::start::{open, quantized};

pub(crate) fn bench(command: &BenchCommand) -> Result<()> {
    match command {
        BenchCommand::Offline(args) => offline::bench_offline(args),
        BenchCommand::Async(args) => asynchrony::bench_async(args),
        BenchCommand::Compare(args) => compare::bench_compare(args),
        BenchCommand::Batching(args) => batching::bench_batching(args),
        BenchCommand::Chats(args) => chats::bench_chats(args),
        BenchCommand::Kernels(args) => kernels::bench_kernels(args),
        BenchCommand::Recorder(args) => recorder::bench_recorder(args),
        BenchCommand::Serve(args) => serve::bench_serve(args),
        BenchCommand::Text(args) => text::bench_text(args),
        BenchCommand::Recall(args) => recall::bench_recall(args),
    }
}

/// The model to measure, and its name.
fn open_measured(measured: &MeasuredModel, args: &EngineArgs) -> Result<(String, ModelFiles)> {
    let (name, files) = match measured.config {
        Some(config) => (config.name().to_owned(), config.dummy(args.seed)?),
        None => {
            let model =
                ModelArgument::parse(&measured.model)?.fetch(is_watched(args.no_progress))?;
            (model.name.clone(), open(&model, args)?)
        }
    };
    Ok((name, quantized(files, args)))
}

fn engine_json(config: &EngineConfig) -> Value {
    json!({
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "max_model_len": config.max_model_len,
        "block_size": config.block_size,
        "num_blocks": config.num_blocks,
    })
}
