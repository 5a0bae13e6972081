//! `inflight bench recall`: what a model finds again in a long prompt.
//!
//! # Source
//! Kamradt, "Needle in a haystack", 2023; several facts of one kind, so that the question decides
//! which one is meant, as in Hsieh et al., "RULER", 2024, section 3.

use std::fs;

use anyhow::{Context, Result, ensure};
use inflight_backend::Backend;
use inflight_bench::plot::{Line, Lines, Plot, Sheet};
use inflight_engine::RequestSpec;
use inflight_model::ModelFiles;
use inflight_tokenizer::{Special, Tokenizer};
use serde_json::{Value, json};

use super::open_measured;
use super::outputs::Outputs;
use super::text::engine_args;
use crate::args::{MeasuredModel, RecallArgs};
use crate::assembly::{Assembled, Model, UseEngine, with_engine};
use crate::device::choose;
use crate::progress::TokenBar;
use crate::resolve::{Workload, resolve_gpu_use};
use crate::text::load_tokenizer;

/// What has a word.
const NAMES: [&str; 5] = ["tiger", "eagle", "horse", "whale", "snake"];

/// The words; texts take turns. Small models copy a word more surely than a number.
const WORDS: [&str; 10] = [
    "lavender", "copper", "thunder", "marble", "orchid", "falcon", "ginger", "velvet", "amber",
    "cactus",
];

/// How far into the prompt each fact lies, in percent.
const DEPTHS: [usize; 5] = [10, 30, 50, 70, 90];

pub(crate) fn bench_recall(args: &RecallArgs) -> Result<()> {
    let outputs = Outputs::create(&args.files)?;
    let measured = MeasuredModel { model: args.model.clone(), config: None };
    let (name, files) = open_measured(&measured, &args.engine)?;
    let questions = questions(args, &files)?;
    let longest = questions.iter().map(Question::len).max().unwrap_or(0);
    let engine_args = engine_args(&args.engine, longest);
    let device = choose(engine_args.device, resolve_gpu_use(&engine_args))?;
    let model = Model { name: &name, path: None, files: &files };
    let ask = Ask { questions: &questions, no_progress: engine_args.no_progress };
    let recalled = with_engine(&device, &model, &engine_args, Workload::alone(false), ask)?;
    print(&recalled);
    outputs.write(|| Ok(as_json(&recalled, &name, args)), || sheet(&recalled, &name, args))
}

/// A prompt that ends with a question, and its answer.
struct Question {
    prompt: Vec<u32>,
    /// Begins with [`Prompts::verb`]: a prompt's cut comes after its first token.
    answer: Vec<u32>,
    /// How many of the answer's last tokens are the word.
    word_len: usize,
    /// Which of [`DEPTHS`] the fact lies at.
    depth: usize,
}

impl Question {
    fn len(&self) -> usize {
        self.prompt.len() + self.answer.len()
    }
}

/// Five for each stretch of the text.
fn questions(args: &RecallArgs, files: &ModelFiles) -> Result<Vec<Question>> {
    let path = args.file.display();
    let text = fs::read_to_string(&args.file).with_context(|| format!("{path}"))?;
    let tokenizer = load_tokenizer(files)?;
    let filler = tokenizer.encode_prompt(&text, Special::AsText)?;
    let (len, texts) = (args.tokens.get(), args.texts.get());
    let (needed, has) = (len.saturating_mul(texts), filler.len());
    ensure!(needed <= has, "{path} has {has} tokens; --tokens times --texts are {needed}");
    let verb = tokenizer.encode(" is", Special::AsText)?;
    let of_text =
        |(text, filler)| Prompts { tokenizer: &tokenizer, text, filler, verb: &verb }.questions();
    let all = filler.chunks_exact(len).take(texts).enumerate().map(of_text);
    Ok(all.collect::<Result<Vec<_>>>()?.into_iter().flatten().collect())
}

/// Prompts that have a stretch of the text in common.
struct Prompts<'a> {
    tokenizer: &'a Tokenizer,
    /// Number of the text.
    text: usize,
    filler: &'a [u32],
    /// Between what a fact is of and its word.
    verb: &'a [u32],
}

impl Prompts<'_> {
    fn questions(&self) -> Result<Vec<Question>> {
        let full_stop = self.tokenizer.encode(".\n\n", Special::AsText)?;
        let facts = (0..NAMES.len()).map(|depth| self.fact(depth)).collect::<Result<Vec<_>>>()?;
        let num_planted: usize = facts
            .iter()
            .map(|(subject, word)| subject.len() + self.verb.len() + word.len() + full_stop.len())
            .sum();
        let subject_len = facts.iter().map(|(subject, _)| subject.len()).max().unwrap_or(0);
        let len = self.filler.len().saturating_sub(num_planted + subject_len);
        ensure!(len > num_planted, "--tokens: {} are too few for facts", self.filler.len());
        let (mut prompt, mut start) = (Vec::new(), 0);
        for ((subject, word), percent) in facts.iter().zip(DEPTHS) {
            let end = len * percent / 100;
            prompt.extend(&self.filler[start..end]);
            prompt.extend(subject.iter().chain(self.verb).chain(word).chain(&full_stop));
            start = end;
        }
        prompt.extend(&self.filler[start..len]);
        let ask = |(depth, (subject, word)): (usize, (Vec<u32>, Vec<u32>))| Question {
            prompt: [&prompt[..], &subject].concat(),
            answer: [self.verb, &word].concat(),
            word_len: word.len(),
            depth,
        };
        Ok(facts.into_iter().enumerate().map(ask).collect())
    }

    /// What a fact is of, and its word.
    fn fact(&self, depth: usize) -> Result<(Vec<u32>, Vec<u32>)> {
        // Names take turns, so that none is tied to a depth.
        let name = NAMES[(depth + self.text) % NAMES.len()];
        let word = WORDS[(self.text * NAMES.len() + depth) % WORDS.len()];
        let encode = |text: &str| self.tokenizer.encode(text, Special::AsText);
        let subject = encode(&format!("\n\nThe secret word of the {name}"))?;
        Ok((subject, encode(&format!(" {word}"))?))
    }
}

struct Ask<'a> {
    questions: &'a [Question],
    no_progress: bool,
}

/// What asking gave.
struct Recalled {
    answers: Vec<Answer>,
    /// Most tokens' places in use.
    num_places: usize,
}

/// One question's.
struct Answer {
    /// Which of [`DEPTHS`] the fact lies at.
    depth: usize,
    /// Whether greedy sampling would have given it.
    is_given: bool,
    /// Of its tokens.
    logprobs: Vec<f32>,
}

impl UseEngine for Ask<'_> {
    type Output = Recalled;

    fn use_engine<B: Backend>(self, assembled: Assembled<B>) -> Result<Recalled> {
        let Assembled { mut engine, handle, config, summary, .. } = assembled;
        eprintln!("{summary}");
        let num_tokens: usize = self.questions.iter().map(|question| question.len() - 1).sum();
        let bar = TokenBar::new(num_tokens as u64, self.no_progress);
        let (mut recalled, mut before) = (Recalled { answers: Vec::new(), num_places: 0 }, 0);
        for Question { prompt, answer, word_len, depth } in self.questions {
            let max_tokens = Some(answer.len());
            let spec = RequestSpec { prompt: prompt.clone(), max_tokens, ..RequestSpec::default() };
            let request = handle.limits().validate(spec)?;
            let scores =
                engine.score(request, answer, &mut |done| bar.show((before + done) as u64))?;
            before += prompt.len() + answer.len() - 1;
            // Of what is found in the KV cache there are no scores.
            let told = scores.logprobs.len() - word_len..;
            recalled.answers.push(Answer {
                depth: *depth,
                is_given: scores.likeliest[told.clone()].iter().all(|likeliest| *likeliest),
                logprobs: scores.logprobs[told].to_vec(),
            });
            let num_places = scores.num_blocks_last * config.block_size;
            recalled.num_places = recalled.num_places.max(num_places);
        }
        bar.finish();
        Ok(recalled)
    }
}

/// How often a fact was recalled, and how likely its tokens were.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Tally {
    num_asked: usize,
    num_recalled: usize,
    /// Geometric mean over tokens.
    likelihood: f64,
}

impl Tally {
    fn of<'a>(answers: impl Iterator<Item = &'a Answer>) -> Self {
        let (mut num_asked, mut num_recalled, mut sum, mut num_tokens) = (0, 0, 0.0, 0);
        for Answer { is_given, logprobs, .. } in answers {
            num_asked += 1;
            num_recalled += usize::from(*is_given);
            sum += logprobs.iter().map(|logprob| f64::from(*logprob)).sum::<f64>();
            num_tokens += logprobs.len();
        }
        let likelihood = (sum / num_tokens.max(1) as f64).exp();
        Self { num_asked, num_recalled, likelihood }
    }
}

impl Recalled {
    fn at_depths(&self) -> impl Iterator<Item = (usize, Tally)> {
        DEPTHS.into_iter().enumerate().map(|(depth, percent)| {
            let here = self.answers.iter().filter(|answer| answer.depth == depth);
            (percent, Tally::of(here))
        })
    }

    fn all(&self) -> Tally {
        Tally::of(self.answers.iter())
    }
}

fn print(recalled: &Recalled) {
    println!("  depth  recalled  likelihood of a token");
    let line = |label: String, tally: Tally| {
        let Tally { num_asked, num_recalled, likelihood } = tally;
        println!("{label:>7}  {:>8}  {likelihood:21.3}", format!("{num_recalled}/{num_asked}"));
    };
    for (percent, tally) in recalled.at_depths() {
        line(format!("{percent} %"), tally);
    }
    line("all".to_owned(), recalled.all());
    println!("KV cache: {} tokens' places in use at the end", recalled.num_places);
}

fn as_json(recalled: &Recalled, name: &str, args: &RecallArgs) -> Value {
    let tally = |tally: Tally| {
        json!({
            "asked": tally.num_asked,
            "recalled": tally.num_recalled,
            "likelihood": tally.likelihood,
        })
    };
    let at = |(percent, counts)| json!({ "depth_percent": percent, "facts": tally(counts) });
    json!({
        "bench": "recall",
        "version": env!("CARGO_PKG_VERSION"),
        "model": name,
        "file": args.file,
        "num_texts": args.texts,
        "num_tokens": args.tokens,
        "places_in_use": recalled.num_places,
        "depths": recalled.at_depths().map(at).collect::<Vec<_>>(),
        "all": tally(recalled.all()),
    })
}

fn sheet(recalled: &Recalled, name: &str, args: &RecallArgs) -> Sheet {
    let share = |(percent, tally): (usize, Tally)| {
        (percent as f64, tally.num_recalled as f64 / tally.num_asked.max(1) as f64)
    };
    let plot = Plot::Lines(Lines {
        title: "Facts recalled".to_owned(),
        x_label: "depth in the prompt, %".to_owned(),
        y_label: "share".to_owned(),
        is_x_log: false,
        lines: vec![Line {
            name: String::new(),
            points: recalled.at_depths().map(share).collect(),
        }],
    });
    Sheet {
        heading: format!("Inflight: what {name} recalls of {} tokens", args.tokens),
        note: format!("inflight bench recall {}", args.file.display()),
        plots: vec![plot],
    }
}

#[cfg(test)]
mod tests {
    use super::{Answer, Tally};

    #[test]
    fn likelihoods_are_geometric_means() {
        let answers = [(true, [0.6f32, 0.9]), (false, [0.9, 0.4])];
        let answers = answers.map(|(is_given, likelihoods)| {
            let logprobs = likelihoods.map(f32::ln).to_vec();
            Answer { depth: 0, is_given, logprobs }
        });
        let Tally { num_asked, num_recalled, likelihood } = Tally::of(answers.iter());
        assert_eq!((num_asked, num_recalled), (2, 1));
        assert!((likelihood - (0.6f64 * 0.9 * 0.9 * 0.4).powf(0.25)).abs() < 1e-6);
    }
}
