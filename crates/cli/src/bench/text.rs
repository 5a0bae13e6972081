//! `inflight bench text`: how well a model predicts a text.

use std::fs;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use inflight_backend::Backend;
use inflight_bench::plot::{Line, Lines, Plot, Sheet};
use inflight_engine::{RequestSpec, Scores};
use inflight_model::ModelFiles;
use inflight_tokenizer::Special;
use serde_json::{Value, json};

use super::open_measured;
use super::outputs::Outputs;
use crate::args::{EngineArgs, MeasuredModel, TextArgs};
use crate::assembly::{Assembled, Model, UseEngine, with_engine};
use crate::device::choose;
use crate::progress::TokenBar;
use crate::resolve::{Workload, resolve_gpu_use};
use crate::text::load_tokenizer;

/// Tokens that are computed, and scored, at once.
const USUAL_BATCH: usize = 256;

pub(crate) fn bench_text(args: &TextArgs) -> Result<()> {
    let outputs = Outputs::create(&args.files)?;
    let measured = MeasuredModel { model: args.model.clone(), config: None };
    let (name, files) = open_measured(&measured, &args.engine)?;
    let texts = read(args, &files)?;
    let engine_args = engine_args(&args.engine, texts[0].len());
    let device = choose(engine_args.device, resolve_gpu_use(&engine_args))?;
    let model = Model { name: &name, path: None, files: &files };
    let score = Score {
        texts: &texts,
        answer_len: args.answer.get(),
        no_progress: engine_args.no_progress,
    };
    let scored = with_engine(&device, &model, &engine_args, Workload::alone(false), score)?;
    print(&scored, args);
    outputs.write(|| Ok(scored.as_json(&name, args)), || scored.sheet(&name, args))
}

/// The texts' tokens.
fn read(args: &TextArgs, files: &ModelFiles) -> Result<Vec<Vec<u32>>> {
    let path = args.file.display();
    let text = fs::read_to_string(&args.file).with_context(|| format!("{path}"))?;
    let tokens = load_tokenizer(files)?.encode_prompt(&text, Special::AsText)?;
    let most = args.engine.max_model_len.map_or(files.config.max_position, NonZeroUsize::get);
    let len = args.tokens.map_or(most.min(tokens.len()), NonZeroUsize::get);
    let answer = args.answer;
    ensure!(len > answer.get(), "texts of {len} tokens have no prompt before --answer {answer}");
    let needed = len.saturating_mul(args.texts.get());
    let has = tokens.len();
    ensure!(needed <= has, "{path} has {has} tokens; --tokens times --texts are {needed}");
    Ok(tokens.chunks_exact(len).take(args.texts.get()).map(<[u32]>::to_vec).collect())
}

/// What fits texts of so many tokens, of which each token of a batch is scored.
pub(super) fn engine_args(args: &EngineArgs, len: usize) -> EngineArgs {
    let mut engine = args.clone();
    engine.memory = engine.memory.measured();
    engine.max_model_len = engine.max_model_len.or(NonZeroUsize::new(len));
    let batch = engine.max_num_batched_tokens.or(NonZeroUsize::new(USUAL_BATCH));
    (engine.max_num_batched_tokens, engine.max_num_seqs) = (batch, batch);
    // Nobody gives way to nobody.
    engine.memory.swap_space = engine.memory.swap_space.or(Some(0.0));
    if engine.kv_cache_memory.is_none() {
        // Of a prompt that is cut a part is there twice for a moment.
        engine.kv_cache_tokens = engine.kv_cache_tokens.or(NonZeroUsize::new(2 * len));
    }
    engine
}

struct Score<'a> {
    texts: &'a [Vec<u32>],
    answer_len: usize,
    no_progress: bool,
}

/// How many tokens of all were scored after how long, batch by batch.
#[derive(Default)]
struct Pace(Vec<(usize, Duration)>);

impl Pace {
    /// When so many tokens were scored; those of a batch count as if they came one by one.
    fn reached(&self, num: usize) -> Duration {
        let batch = self.0.partition_point(|(done, _)| *done < num);
        let Some(&(done, time)) = self.0.get(batch) else { return Duration::ZERO };
        let last = batch.checked_sub(1).map(|last| self.0[last]);
        let (before, earlier) = last.unwrap_or((0, Duration::ZERO));
        let share = (num - before) as f64 / (done - before).max(1) as f64;
        earlier + time.saturating_sub(earlier).mul_f64(share)
    }

    /// Tokens per second of a stretch.
    fn rate(&self, tokens: Range<usize>) -> f64 {
        let took = self.reached(tokens.end).saturating_sub(self.reached(tokens.start));
        tokens.len() as f64 / took.as_secs_f64()
    }
}

/// What scoring gave, and on what.
struct Scored {
    /// Of each text.
    scores: Vec<Scores>,
    pace: Pace,
    num_blocks: usize,
    block_size: usize,
}

impl UseEngine for Score<'_> {
    type Output = Scored;

    fn use_engine<B: Backend>(self, assembled: Assembled<B>) -> Result<Scored> {
        let Assembled { mut engine, handle, config, summary, .. } = assembled;
        eprintln!("{summary}");
        let num_tokens: usize = self.texts.iter().map(|text| text.len() - 1).sum();
        let bar = TokenBar::new(num_tokens as u64, self.no_progress);
        let (started, mut pace) = (Instant::now(), Pace::default());
        let (mut scores, mut num_before) = (Vec::new(), 0);
        for text in self.texts {
            let (prompt, answer) = text.split_at(text.len() - self.answer_len);
            let spec = RequestSpec {
                prompt: prompt.to_vec(),
                max_tokens: Some(answer.len()),
                ..RequestSpec::default()
            };
            let request = handle.limits().validate(spec)?;
            scores.push(engine.score(request, answer, &mut |done| {
                pace.0.push((num_before + done, started.elapsed()));
                bar.show((num_before + done) as u64);
            })?);
            num_before += text.len() - 1;
        }
        bar.finish();
        let (num_blocks, block_size) = (config.num_blocks, config.block_size);
        Ok(Scored { scores, pace, num_blocks, block_size })
    }
}

fn print(scored: &Scored, args: &TextArgs) {
    let Scored { scores, num_blocks, block_size, .. } = scored;
    println!("          tokens  perplexity  tokens/s");
    let line = |label: String, perplexity: f64, rate: String| {
        println!("{label:>16}  {perplexity:10.3}  {rate:>8}");
    };
    for Stretch { tokens, perplexity, rate } in scored.stretches(args) {
        line(format!("{}..{}", tokens.start, tokens.end), perplexity, format!("{rate:.1}"));
    }
    let all = scored.logprobs();
    line("all".to_owned(), perplexity(&all), format!("{:.1}", scored.pace.rate(0..all.len())));
    line("answers".to_owned(), perplexity(&scored.answers(args)), String::new());
    let used = scores.iter().map(|scores| scores.num_blocks).max().unwrap_or(0);
    let last = scores.last().map_or(0, |scores| scores.num_blocks_last);
    println!(
        "KV cache: at most {} of {} tokens' places in use, {} at the end",
        used * block_size,
        num_blocks * block_size,
        last * block_size
    );
}

/// A part of all tokens.
struct Stretch {
    tokens: Range<usize>,
    perplexity: f64,
    /// Tokens a second.
    rate: f64,
}

impl Scored {
    /// Of all texts, one behind the other.
    fn logprobs(&self) -> Vec<f32> {
        self.scores.iter().flat_map(|scores| scores.logprobs.clone()).collect()
    }

    /// Those of the texts' last tokens.
    fn answers(&self, args: &TextArgs) -> Vec<f32> {
        let answer = |scores: &Scores| {
            let num_before = scores.logprobs.len() - args.answer.get();
            scores.logprobs[num_before..].to_vec()
        };
        self.scores.iter().flat_map(answer).collect()
    }

    fn stretches(&self, args: &TextArgs) -> Vec<Stretch> {
        let (all, every) = (self.logprobs(), args.every.get());
        let stretch = |(i, logprobs): (usize, &[f32])| {
            let tokens = i * every..i * every + logprobs.len();
            let rate = self.pace.rate(tokens.clone());
            Stretch { tokens, perplexity: perplexity(logprobs), rate }
        };
        all.chunks(every).enumerate().map(stretch).collect()
    }

    fn as_json(&self, name: &str, args: &TextArgs) -> Value {
        let stretch = |Stretch { tokens, perplexity, rate }: Stretch| {
            json!({
                "start": tokens.start,
                "end": tokens.end,
                "perplexity": perplexity,
                "tokens_per_s": rate,
            })
        };
        json!({
            "bench": "text",
            "version": env!("CARGO_PKG_VERSION"),
            "model": name,
            "file": args.file,
            "num_texts": self.scores.len(),
            "answer_len": args.answer,
            "perplexity": perplexity(&self.logprobs()),
            "answers_perplexity": perplexity(&self.answers(args)),
            "kv_cache_tokens": self.num_blocks * self.block_size,
            "stretches": self.stretches(args).into_iter().map(stretch).collect::<Vec<_>>(),
        })
    }

    fn sheet(&self, name: &str, args: &TextArgs) -> Sheet {
        let stretches = self.stretches(args);
        let plot = |title: &str, y_label: &str, of: fn(&Stretch) -> f64| {
            let points = stretches.iter().map(|part| (part.tokens.end as f64, of(part)));
            Plot::Lines(Lines {
                title: title.to_owned(),
                x_label: "tokens so far".to_owned(),
                y_label: y_label.to_owned(),
                is_x_log: false,
                lines: vec![Line { name: String::new(), points: points.collect() }],
            })
        };
        Sheet {
            heading: format!("Inflight: how well {name} predicts a text"),
            note: format!("inflight bench text {}", args.file.display()),
            plots: vec![
                plot("Perplexity", "", |part| part.perplexity),
                plot("Speed", "tok/s", |part| part.rate),
            ],
        }
    }
}

fn perplexity(logprobs: &[f32]) -> f64 {
    let sum: f64 = logprobs.iter().map(|logprob| f64::from(*logprob)).sum();
    (-sum / logprobs.len().max(1) as f64).exp()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::{Pace, perplexity};

    /// 256 tokens after two seconds, 44 more after one more.
    #[test]
    fn stretches_shorter_than_a_batch_have_its_rate() {
        let pace = Pace(vec![(256, Duration::from_secs(2)), (300, Duration::from_secs(3))]);
        assert_eq!(pace.rate(0..64), 128.0);
        assert_eq!(pace.rate(128..192), 128.0);
        assert_eq!(pace.rate(0..300), 100.0);
        assert_eq!(pace.reached(278), Duration::from_millis(2500));
    }

    /// Guessing among eight is a perplexity of eight.
    #[test]
    fn perplexity_is_the_number_of_equal_choices() {
        let logprob = -(8f32.ln());
        assert!((perplexity(&[logprob; 5]) - 8.0).abs() < 1e-5);
        assert!((perplexity(&[0.0, -(4f32.ln())]) - 2.0).abs() < 1e-6);
    }
}
