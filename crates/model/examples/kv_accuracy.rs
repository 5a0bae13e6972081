//! What each type of KV cache, and weights in fp8, cost in accuracy: a model under teacher forcing
//! on texts whose logprobs are known in double precision.
//!
//! ```text
//! kv_accuracy cpu MODEL.gguf EXACT.json [weights]        # tests/default_model/exact.json
//! kv_accuracy cuda MODEL.gguf EXACT.json [CACHE_FOLDER]
//! ```

use std::{error::Error, path::Path};

use inflight_backend::{
    Backend, CpuBackend, CpuConfig, CudaBackend, CudaConfig, KvDtype, WeightPrecision,
    cuda::{Numerics, Softmax, usual_library_folders},
};
use inflight_model::{Decoder, ModelFiles, eval::logits_from, kv_bytes_per_block};
use serde::Deserialize;

type Failure = Box<dyn Error>;

/// A text and what a forward pass in double precision says of it.
#[derive(Deserialize)]
struct Text {
    tokens: Vec<u32>,
    first: usize,
    logprobs: Vec<f64>,
}

/// Logprobs of the texts' tokens, and the likeliest token at each place.
struct Predictions {
    logprobs: Vec<f64>,
    tops: Vec<usize>,
    /// How much likelier the likeliest is than the next, in logits.
    margins: Vec<f32>,
}

fn main() -> Result<(), Failure> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [device, model, exact, rest @ ..] = &arguments[..] else {
        return Err("usage: see the example's first lines".into());
    };
    let files = ModelFiles::open(Path::new(model))?;
    let texts: Vec<Text> = serde_json::from_str(&std::fs::read_to_string(exact)?)?;
    let mut report = Report::new(files, &texts);
    if device == "cpu" {
        // With `weights` the last line alone.
        let all = rest.is_empty();
        let dtypes =
            [KvDtype::F32, KvDtype::F16, KvDtype::Bf16, KvDtype::Int8, KvDtype::Fp8, KvDtype::Int4];
        for kv_dtype in dtypes.into_iter().filter(|_| all) {
            let weights = WeightPrecision::F32;
            let config = CpuConfig { kv_dtype, weights, ..CpuConfig::detect() };
            report.add(&kv_dtype.to_string(), &CpuBackend::new(config)?)?;
        }
        let (kv_dtype, weights) = (KvDtype::F32, WeightPrecision::F32);
        let config = CpuConfig { kv_dtype, weights, ..CpuConfig::detect() };
        report.files.round_to_fp8(false);
        report.add("f32, fp8 weights", &CpuBackend::new(config)?)?;
        return Ok(());
    }
    let cache = rest.first().map(Into::into);
    for (kv_dtype, softmax) in [
        (KvDtype::Bf16, Softmax::Online),
        (KvDtype::Bf16, Softmax::Unified),
        (KvDtype::Int8, Softmax::Online),
        (KvDtype::Int8, Softmax::Unified),
        (KvDtype::Fp8, Softmax::Online),
        (KvDtype::Fp8, Softmax::Unified),
        (KvDtype::Int4, Softmax::Online),
        (KvDtype::Int4, Softmax::Unified),
    ] {
        let backend = CudaBackend::new(CudaConfig {
            ordinal: 0,
            library_folders: usual_library_folders(|name| std::env::var_os(name)),
            cache: cache.clone(),
            keeps_fastest: true,
            graphs: true,
            blocking_waits: true,
            numerics: Numerics { kv_dtype, softmax, ..Numerics::default() },
        })?;
        report.add(&format!("{kv_dtype} {softmax:?}"), &backend)?;
        println!("{:18} rows computed again: {}", "", backend.num_recomputed()?);
    }
    Ok(())
}

struct Report<'a> {
    files: ModelFiles,
    texts: &'a [Text],
    /// Of the first cache that was added.
    widest: Option<Predictions>,
}

impl<'a> Report<'a> {
    fn new(files: ModelFiles, texts: &'a [Text]) -> Self {
        println!(
            "KV cache           bytes/token  |d logprob| to exact  to the first  same top  of clear"
        );
        Self { files, texts, widest: None }
    }

    fn add<B: Backend>(&mut self, name: &str, backend: &B) -> Result<(), Failure> {
        let ModelFiles { config, weights, .. } = &self.files;
        let decoder = Decoder::load(backend, config, weights, 2048, &mut |_| {})?;
        let found = self.predict(backend, &decoder)?;
        let exact: Vec<f64> = self.texts.iter().flat_map(|text| text.logprobs.clone()).collect();
        let first = self.widest.as_ref().unwrap_or(&found);
        let tops = || found.tops.iter().zip(&first.tops).zip(&first.margins);
        let share = |same: usize, all: usize| 100.0 * same as f64 / all.max(1) as f64;
        let same = tops().filter(|((a, b), _)| a == b).count();
        let clear = tops().filter(|(_, margin)| **margin > 0.5).count();
        let same_clear = tops().filter(|((a, b), margin)| **margin > 0.5 && a == b).count();
        let drift = |others: &[f64]| {
            let differences = found.logprobs.iter().zip(others).map(|(a, b)| (a - b).abs());
            let (sum, worst) = differences.fold((0.0, 0f64), |(s, w), d| (s + d, w.max(d)));
            format!("{:.4} (most {worst:.3})", sum / others.len() as f64)
        };
        println!(
            "{name:18} {:11}  {:>20}  {:>20}  {:6.2} %  {:6.2} %",
            kv_bytes_per_block(config, backend.kv_dtype(), 16) / 16,
            drift(&exact),
            drift(&first.logprobs),
            share(same, found.tops.len()),
            share(same_clear, clear),
        );
        self.widest.get_or_insert(found);
        Ok(())
    }

    /// Token by token, as answers are computed.
    fn predict<B: Backend>(
        &self,
        backend: &B,
        decoder: &Decoder<B>,
    ) -> Result<Predictions, Failure> {
        let mut found = Predictions { logprobs: vec![], tops: vec![], margins: vec![] };
        for Text { tokens, first, .. } in self.texts {
            let inputs = &tokens[..tokens.len() - 1];
            let logits = logits_from(backend, decoder, inputs, first - 1, 1)?;
            for (row, target) in
                logits.chunks_exact(self.files.config.vocab_size).zip(&tokens[*first..])
            {
                found.push(row, *target);
            }
        }
        Ok(found)
    }
}

impl Predictions {
    fn push(&mut self, logits: &[f32], target: u32) {
        let (mut top, mut next) = (0, f32::NEG_INFINITY);
        for (i, logit) in logits.iter().enumerate().skip(1) {
            if *logit > logits[top] {
                next = logits[top];
                top = i;
            } else {
                next = next.max(*logit);
            }
        }
        let max = f64::from(logits[top]);
        let sum: f64 = logits.iter().map(|logit| (f64::from(*logit) - max).exp()).sum();
        self.logprobs.push(f64::from(logits[target as usize]) - max - sum.ln());
        self.tops.push(top);
        self.margins.push(logits[top] - next);
    }
}
