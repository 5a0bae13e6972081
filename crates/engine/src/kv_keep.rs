//! What stays in the KV cache of a request.

use inflight_kv_cache::{Attended, Retention, SinkWindow};
use inflight_model::ModelConfig;

/// What stays in the KV cache of a request that goes on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum KvKeep {
    /// All that the model can see.
    #[default]
    All,
    /// Sinks and a window, so that a request may have any number of tokens in constant memory.
    Latest(KvWindow),
    /// Of a prompt so many tokens, those that its end attends to most, and all that is generated.
    /// Rounded up to blocks.
    Attended(usize),
}

/// The first tokens and the latest ones. Both are rounded up to blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvWindow {
    /// Tokens at the start that stay.
    pub num_sinks: usize,
    /// Of the tokens behind them, how many of the latest are in the cache at most.
    pub window: usize,
}

impl KvWindow {
    /// Sinks that suffice for most models: four, by Xiao et al., 2023, table 2.
    pub const USUAL_SINKS: usize = 4;
}

/// What decides how many tokens a request may have, given what it keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvTerms {
    /// What requests keep that do not say.
    pub usual: KvKeep,
    /// Tokens of a block.
    pub block_size: usize,
    /// Most tokens of one row.
    pub max_row_len: usize,
    /// Tokens of context that the model was made for.
    pub context: usize,
    /// How far back the model's layers look at most; `None`: some see everything.
    pub widest_window: Option<usize>,
    /// How far back every layer looks at least; `None`: all see everything.
    pub narrowest_window: Option<usize>,
    /// Whether the device can tell what a prompt's end attends to.
    pub cuts_prompts: bool,
}

impl KvTerms {
    /// Everything is kept and can be seen.
    pub const UNBOUND: Self = Self {
        usual: KvKeep::All,
        block_size: inflight_kv_cache::DEFAULT_BLOCK_SIZE,
        max_row_len: usize::MAX,
        context: usize::MAX,
        widest_window: None,
        narrowest_window: None,
        cuts_prompts: true,
    };

    /// The terms that a model sets, everything else being usual.
    pub fn of(model: &ModelConfig) -> Self {
        let windows = || model.layer_windows.iter().copied();
        let all_have_one = windows().all(|window| window.is_some());
        Self {
            context: model.max_position,
            widest_window: windows().flatten().max().filter(|_| all_have_one),
            narrowest_window: windows().flatten().min(),
            ..Self::UNBOUND
        }
    }

    /// Which tokens stay in the cache of a request with such a prompt, given that
    /// [`check`](Self::check) found nothing.
    pub fn retention(&self, keep: KvKeep, prompt_len: usize) -> Retention {
        match (keep, self.widest_window) {
            (KvKeep::Attended(num_kept), _) => Retention::Attended(Attended::new(
                prompt_len,
                num_kept.max(Attended::OBSERVED + 1),
                Attended::OBSERVED,
                self.block_size,
            )),
            (KvKeep::All, None) => Retention::All,
            (KvKeep::All, Some(window)) => Retention::Window { window },
            (KvKeep::Latest(KvWindow { num_sinks, window }), _) => {
                Retention::Sinks(SinkWindow::new(num_sinks, window, self.block_size))
            }
        }
    }

    /// Most tokens of a request that keeps this, in a cache of so many: what the model was made
    /// for, and what there is room for.
    pub fn max_len(&self, keep: KvKeep, kv_cache_tokens: usize) -> usize {
        let retention = self.retention(keep, 0);
        let most = retention.most_blocks(usize::MAX, self.max_row_len, self.block_size);
        let room = match most <= kv_cache_tokens / self.block_size {
            true => usize::MAX,
            false => kv_cache_tokens,
        };
        match keep {
            KvKeep::All | KvKeep::Attended(_) => room.min(self.context),
            KvKeep::Latest(_) => room,
        }
    }

    /// Blocks that a request of so many tokens takes at most.
    pub fn most_blocks(&self, num_tokens: usize) -> usize {
        let retention = self.retention(self.usual, num_tokens.saturating_sub(1));
        retention.most_blocks(num_tokens, self.max_row_len, self.block_size)
    }

    /// Says what is wrong with keeping this, if anything is, in a cache of so many tokens.
    ///
    /// # Errors
    /// Words that follow the name of the setting.
    pub fn check(&self, keep: KvKeep, kv_cache_tokens: usize) -> Result<(), String> {
        if let KvKeep::Attended(num_kept) = keep {
            return self.check_attended(num_kept);
        }
        let Retention::Sinks(sinks) = self.retention(keep, 0) else { return Ok(()) };
        if matches!(keep, KvKeep::Latest(KvWindow { window: 0, .. })) {
            return Err("has a window of 0 tokens; it must be at least 1".to_owned());
        }
        let (capacity, places) = (sinks.capacity(), sinks.num_places());
        let whole = format!("sinks and window are {capacity} tokens in whole blocks");
        if capacity > self.context {
            let context = self.context;
            return Err(format!("is too large: {whole}, the model was made for {context}"));
        }
        if self.narrowest_window.is_some_and(|narrowest| capacity > narrowest) {
            return Err(format!("is too large: {whole}, more than the model's own window"));
        }
        if places > kv_cache_tokens {
            return Err(format!(
                "is too large: {whole} and take {places} places with the sinks twice, the whole \
                 KV cache has {kv_cache_tokens}"
            ));
        }
        Ok(())
    }
}

impl KvTerms {
    fn check_attended(&self, num_kept: usize) -> Result<(), String> {
        let least = Attended::OBSERVED + self.block_size;
        if !self.cuts_prompts {
            return Err("has a budget, which this device cannot keep to".to_owned());
        }
        if self.narrowest_window.is_some() {
            return Err("has a budget, but the model has windows of its own".to_owned());
        }
        if num_kept < least {
            return Err(format!("has a budget of {num_kept} tokens; it must be at least {least}"));
        }
        if self.max_row_len < 2 * Attended::OBSERVED {
            let needed = 2 * Attended::OBSERVED;
            return Err(format!("has a budget: that needs batches of at least {needed} tokens"));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TERMS: KvTerms = KvTerms {
        usual: KvKeep::All,
        block_size: 16,
        max_row_len: 64,
        context: 8192,
        widest_window: None,
        narrowest_window: None,
        cuts_prompts: true,
    };

    fn latest(num_sinks: usize, window: usize) -> KvKeep {
        KvKeep::Latest(KvWindow { num_sinks, window })
    }

    #[test]
    fn what_is_kept_bounds_the_length() {
        assert_eq!(TERMS.max_len(KvKeep::All, 1 << 20), 8192);
        assert_eq!(TERMS.max_len(KvKeep::All, 4096), 4096);
        assert_eq!(TERMS.max_len(latest(4, 4064), 4096), usize::MAX);
        let windowed = KvTerms { widest_window: Some(1000), ..TERMS };
        assert_eq!(windowed.max_len(KvKeep::All, 2048), 8192, "the pool need not hold all");
        assert_eq!(windowed.max_len(KvKeep::All, 1024), 1024);
    }

    #[test]
    fn what_cannot_work_is_named() {
        let check = |terms: KvTerms, keep, expected: &str| {
            let found = terms.check(keep, 4096).err().unwrap_or_default();
            assert!(found.contains(expected), "{found:?} does not say {expected:?}");
            assert_eq!(found.is_empty(), expected.is_empty(), "{found}");
        };
        check(TERMS, latest(4, 4064), "");
        check(TERMS, KvKeep::All, "");
        check(TERMS, latest(4, 4080), "take 4112 places");
        check(TERMS, latest(4, 0), "at least 1");
        check(KvTerms { context: 2048, ..TERMS }, latest(4, 4000), "was made for 2048");
        check(TERMS, KvKeep::Attended(48), "");
        check(TERMS, KvKeep::Attended(47), "at least 48");
        check(KvTerms { cuts_prompts: false, ..TERMS }, KvKeep::Attended(99), "this device");
        check(KvTerms { max_row_len: 63, ..TERMS }, KvKeep::Attended(99), "at least 64");
        let narrow = KvTerms { narrowest_window: Some(512), ..TERMS };
        check(narrow, latest(4, 512), "the model's own window");
    }
}
