//! Constraints to grammars of the engine.

use std::{
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, mpsc},
    thread,
    time::Duration,
};

use inflight_engine::SharedGrammar;
use inflight_tokenizer::Tokenizer;
use llguidance::{
    Matcher, ParserFactory,
    api::{GrammarWithLexer, ParserLimits, TopLevelGrammar},
    earley::SlicedBiasComputer,
    toktrie::InferenceCapabilities,
};
use serde_json::{Value, json};

use crate::{
    Constraint, GrammarError, cache::Cache, gbnf, lark, matcher::CompiledGrammar,
    vocabulary::vocabulary,
};

/// What may stand between the parts of JSON: a space, or a new line with an indent. Unbounded white
/// space is what small models lose themselves in.
pub(crate) const JSON_WHITESPACE: &str = r" |\n[ \t]{0,20}";

/// Longest that anyone waits for a constraint.
const MAX_COMPILE_TIME: Duration = Duration::from_secs(10);
/// Most constraints that are compiled at once; each keeps a thread busy.
const MAX_COMPILING: usize = 4;
/// `llguidance` goes as deep as a constraint is nested; memory is only taken where it does.
const STACK_BYTES: usize = 256 << 20;

/// Compiles constraints for one model. Takes a while to make; cloning gives another handle.
#[derive(Clone)]
pub struct GrammarCompiler {
    shared: Arc<Shared>,
}

struct Shared {
    factory: ParserFactory,
    cache: Mutex<Cache>,
    num_compiling: Mutex<usize>,
    place_free: Condvar,
}

impl GrammarCompiler {
    /// Reads a model's vocabulary, which takes some tenths of a second. `vocab_size`: the tokens
    /// that the model knows.
    ///
    /// # Errors
    /// [`GrammarError::Vocabulary`].
    pub fn new(tokenizer: &Tokenizer, vocab_size: usize) -> Result<Self, GrammarError> {
        let failed = |error| GrammarError::Vocabulary(format!("{error:#}"));
        let tokens = vocabulary(tokenizer, vocab_size)?;
        let slices = SlicedBiasComputer::general_slices();
        let capabilities = InferenceCapabilities::default();
        let mut factory = ParserFactory::new(&tokens, capabilities, &slices).map_err(failed)?;
        factory.quiet();
        *factory.limits_mut() = limits();
        let (cache, num_compiling, place_free) = Default::default();
        Ok(Self { shared: Arc::new(Shared { factory, cache, num_compiling, place_free }) })
    }

    /// Compiles a constraint, or takes it from the cache. Blocks: for 10 s at most while others are
    /// compiled, and as long while this one is.
    ///
    /// # Errors
    /// What about the constraint is wrong, too large or cannot be enforced.
    pub fn compile(&self, constraint: &Constraint) -> Result<SharedGrammar, GrammarError> {
        constraint.check()?;
        let key = constraint.key();
        if let Some(grammar) = self.shared.cache().get(&key) {
            return Ok(grammar);
        }
        let source = TopLevelGrammar::from_grammar(source(constraint)?);
        let place = Place::take(&self.shared)?;
        let (sender, result) = mpsc::channel();
        let thread = thread::Builder::new().name("compile".to_owned()).stack_size(STACK_BYTES);
        let spawned = thread.spawn(move || {
            let shared = &place.0;
            let grammar = shared.compile(source).map(|g| SharedGrammar(Arc::new(g)));
            if let Ok(grammar) = &grammar {
                shared.cache().insert(key, grammar.clone());
            }
            // Whoever asked may have given up.
            let _ = sender.send(grammar);
        });
        spawned.map_err(|_| GrammarError::Busy)?;
        result.recv_timeout(MAX_COMPILE_TIME).unwrap_or_else(|_| {
            let limit = MAX_COMPILE_TIME.as_secs();
            Err(GrammarError::Refused(format!("takes longer than {limit} s to compile")))
        })
    }
}

impl Shared {
    fn compile(&self, source: TopLevelGrammar) -> Result<CompiledGrammar, GrammarError> {
        let refused = |error| GrammarError::Refused(plain(&format!("{error:#}")));
        let parser = self.factory.create_parser(source).map_err(refused)?;
        let mut matcher = Matcher::new(Ok(parser));
        // What fails at the first token would fail every output.
        matcher.compute_mask_or_eos().map_err(refused)?;
        Ok(CompiledGrammar::new(matcher))
    }

    fn cache(&self) -> MutexGuard<'_, Cache> {
        self.cache.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One of the places for constraints being compiled; given back when dropped.
struct Place(Arc<Shared>);

impl Place {
    /// Waits for one.
    fn take(shared: &Arc<Shared>) -> Result<Self, GrammarError> {
        let num_compiling = shared.num_compiling.lock().unwrap_or_else(PoisonError::into_inner);
        let is_full = |num_compiling: &mut usize| *num_compiling >= MAX_COMPILING;
        let waited = shared.place_free.wait_timeout_while(num_compiling, MAX_COMPILE_TIME, is_full);
        let (mut num_compiling, waited) = waited.unwrap_or_else(PoisonError::into_inner);
        if waited.timed_out() {
            return Err(GrammarError::Busy);
        }
        *num_compiling += 1;
        Ok(Self(Arc::clone(shared)))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        *self.0.num_compiling.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
        self.0.place_free.notify_one();
    }
}

impl std::fmt::Debug for GrammarCompiler {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GrammarCompiler").finish_non_exhaustive()
    }
}

/// # Source
/// llguidance's `ParserLimits`, which tells how fast each kind of fuel burns: some 20 ms for a
/// lexer, 14 ms at most for a mask.
fn limits() -> ParserLimits {
    ParserLimits { verbose_errors: false, ..ParserLimits::default() }
}

fn source(constraint: &Constraint) -> Result<GrammarWithLexer, GrammarError> {
    Ok(match constraint {
        Constraint::JsonObject => json_schema(&json!({ "type": "object" }))?,
        Constraint::JsonSchema(schema) => json_schema(schema)?,
        Constraint::Regex(regex) => GrammarWithLexer::from_regex(regex),
        Constraint::Grammar(text) if gbnf::looks_like(text) => {
            GrammarWithLexer::from_lark(gbnf::to_lark(text)?)
        }
        Constraint::Grammar(text) => GrammarWithLexer::from_lark(text.clone()),
        Constraint::Gbnf(text) => GrammarWithLexer::from_lark(gbnf::to_lark(text)?),
        Constraint::Choice(choices) => GrammarWithLexer::from_lark(lark::choice(choices)),
    })
}

/// A schema with our options in it, whatever options it came with.
fn json_schema(schema: &Value) -> Result<GrammarWithLexer, GrammarError> {
    let mut schema = match schema {
        Value::Bool(true) => json!({}),
        Value::Object(_) => schema.clone(),
        _ => {
            let reason = "a JSON schema must be an object, or true".to_owned();
            return Err(GrammarError::Refused(reason));
        }
    };
    schema["x-guidance"] = json!({ "whitespace_pattern": JSON_WHITESPACE });
    Ok(GrammarWithLexer::from_json_schema(schema))
}

/// An error's text without advice on options that nobody can set.
fn plain(error: &str) -> String {
    let (text, _) = error.split_once(" Enable 'coerce_one_of'").unwrap_or((error, ""));
    const MAX_CHARS: usize = 600;
    text.trim().chars().take(MAX_CHARS).collect()
}
