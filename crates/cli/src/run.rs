//! `inflight run`: print the answer to one prompt.

use std::future;
use std::io::{self, Read, Write};
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use inflight_tokenizer::{ChatInput, Special, TextPosition, Tokenizer};
use serde_json::json;

use crate::answer::{Question, answer};
use crate::args::{PolicyArgs, RunArgs, Switch};
use crate::models::ModelArgument;
use crate::progress::is_watched;
use crate::resolve::Workload;
use crate::start::start;

pub(crate) fn run(args: RunArgs) -> Result<()> {
    ensure!(
        !(args.raw && args.sampling.system.is_some()),
        "--system needs the chat template, \
        which --raw leaves out"
    );
    let text = if args.prompt == "-" { read_stdin()? } else { args.prompt.clone() };
    let model = ModelArgument::parse(&args.model)?.fetch(is_watched(args.engine.no_progress))?;
    let workload = Workload::alone(args.steps.overlap == Switch::On);
    let running = start(&model, &args.engine, &args.steps, &PolicyArgs::default(), workload)?;
    let (prompt, position) = encode(&running.tokenizer, &args, &text)?;
    let question = Question { prompt, position, sampling: &args.sampling, seed: args.engine.seed };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let started = Instant::now();
    let answered = runtime.block_on(answer(&running, question, print, future::pending()))?;
    if !answered.text.ends_with('\n') {
        print("\n")?;
    }
    let tokens_per_s = answered.num_tokens as f64 / started.elapsed().as_secs_f64();
    tracing::info!(tokens = answered.num_tokens, tokens_per_s, cut = answered.is_cut, "answered");
    running.stop()
}

fn read_stdin() -> Result<String> {
    let mut text = String::new();
    io::stdin().read_to_string(&mut text).context("standard input is not text")?;
    Ok(text)
}

/// The prompt's tokens, and whether the answer continues the prompt or starts a text.
fn encode(tokenizer: &Tokenizer, args: &RunArgs, text: &str) -> Result<(Vec<u32>, TextPosition)> {
    let has_template = tokenizer.chat_template().is_ok();
    if args.raw || !has_template {
        if !args.raw {
            tracing::warn!("the model has no chat template: continuing the prompt as it is");
        }
        return Ok((tokenizer.encode_prompt(text, Special::Parse)?, TextPosition::Continuing));
    }
    let system = args.sampling.system.iter().map(|s| json!({"role": "system", "content": s}));
    let messages = system.chain([json!({"role": "user", "content": text})]).collect();
    let prompt = tokenizer.render_chat(&ChatInput {
        messages: &messages,
        tools: None,
        add_generation_prompt: true,
        extra: None,
    })?;
    Ok((tokenizer.encode_prompt(&prompt, Special::Parse)?, TextPosition::Start))
}

/// Prints a piece at once.
pub(crate) fn print(piece: &str) -> io::Result<()> {
    let mut stdout = io::stdout().lock();
    stdout.write_all(piece.as_bytes())?;
    stdout.flush()
}
