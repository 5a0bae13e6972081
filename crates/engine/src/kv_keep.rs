//! What stays in the KV cache of a request.

use inflight_backend::MAX_LAYER_GROUPS;
use inflight_kv_cache::{Attended, Retention, SinkWindow};
use inflight_model::{LayerGroups, ModelConfig};

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

/// How far back the layers of the groups behind the first look; `None`: on everything.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OtherWindows {
    windows: [Option<usize>; MAX_LAYER_GROUPS - 1],
    num_groups: usize,
}

impl OtherWindows {
    /// Of a model whose layers are all alike.
    pub const NONE: Self = Self { windows: [None; MAX_LAYER_GROUPS - 1], num_groups: 0 };

    /// Those of a model.
    pub fn of(groups: &LayerGroups) -> Self {
        let mut other = Self::NONE;
        other.num_groups = groups.other_windows().len();
        other.windows[..other.num_groups].copy_from_slice(groups.other_windows());
        other
    }

    /// Of each group.
    pub fn as_slice(&self) -> &[Option<usize>] {
        &self.windows[..self.num_groups]
    }
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
    /// The model's layer groups behind the first.
    pub other_windows: OtherWindows,
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
        other_windows: OtherWindows::NONE,
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
            other_windows: OtherWindows::of(&LayerGroups::new(model)),
            widest_window: windows().flatten().max().filter(|_| all_have_one),
            narrowest_window: windows().flatten().min(),
            ..Self::UNBOUND
        }
    }

    /// Which tokens stay in the cache of a request with such a prompt, given that
    /// [`check`](Self::check) found nothing. Of the model's first layer group; others follow.
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
        let num_blocks = kv_cache_tokens / self.block_size;
        let fits = |len: usize| self.blocks_of(retention, len) <= num_blocks;
        let room = match fits(usize::MAX) {
            true => usize::MAX,
            // As many tokens as all groups together have room for.
            false if self.other_windows.num_groups > 0 => last(kv_cache_tokens, fits),
            false => kv_cache_tokens,
        };
        match keep {
            KvKeep::All | KvKeep::Attended(_) => room.min(self.context),
            KvKeep::Latest(_) => room,
        }
    }

    /// Blocks that a request of so many tokens takes at most.
    pub fn most_blocks(&self, num_tokens: usize) -> usize {
        self.blocks_of(self.retention(self.usual, num_tokens.saturating_sub(1)), num_tokens)
    }

    /// Blocks that a sequence of so many tokens takes at most, of all layer groups.
    pub fn blocks_of(&self, retention: Retention, num_tokens: usize) -> usize {
        let of = |retention: Retention| {
            retention.most_blocks(num_tokens, self.max_row_len, self.block_size)
        };
        let others = self.other_windows.as_slice().iter();
        let others = others.map(|window| of(retention.of_group(*window)));
        others.fold(of(retention), usize::saturating_add)
    }

    /// Tokens that `num_blocks` blocks hold of requests of `len` tokens each.
    pub fn num_tokens(&self, num_blocks: usize, len: usize) -> usize {
        if self.other_windows.num_groups == 0 {
            return num_blocks.saturating_mul(self.block_size);
        }
        let tokens = num_blocks as u128 * len as u128 / self.most_blocks(len).max(1) as u128;
        usize::try_from(tokens).unwrap_or(usize::MAX)
    }

    /// Blocks that hold `num_tokens` tokens of requests of `len` tokens each.
    pub fn num_blocks(&self, num_tokens: usize, len: usize) -> usize {
        if self.other_windows.num_groups == 0 {
            return num_tokens.div_ceil(self.block_size);
        }
        let num_whole = num_tokens / len.max(1);
        let rest = self.most_blocks(num_tokens % len.max(1));
        num_whole.saturating_mul(self.most_blocks(len)).saturating_add(rest)
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
        let num_groups = 1 + self.other_windows.num_groups;
        let (capacity, places) = (sinks.capacity(), sinks.num_places() * num_groups);
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

/// The last number up to `most` for which something is so, if it is so up to there and never again.
fn last(most: usize, is_so: impl Fn(usize) -> bool) -> usize {
    let (mut low, mut high) = (0, most);
    while low < high {
        let middle = low + (high - low).div_ceil(2);
        if is_so(middle) { low = middle } else { high = middle - 1 }
    }
    low
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
        other_windows: OtherWindows::NONE,
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
    fn all_layer_groups_need_room() {
        let windows = [Some(100), Some(100)];
        let mut other_windows = OtherWindows { num_groups: 2, ..OtherWindows::NONE };
        other_windows.windows[..2].copy_from_slice(&windows);
        let terms = KvTerms { other_windows, ..TERMS };
        // A window of 100 and a row of 64 lie in 12 blocks of 16 at most.
        assert_eq!(terms.most_blocks(4096), 256 + 2 * 12);
        assert_eq!(terms.most_blocks(160), 30);
        // Of 100 blocks two windows take 24.
        assert_eq!(terms.max_len(KvKeep::All, 1600), 76 * 16);
        assert_eq!(terms.max_len(KvKeep::All, 160), 48, "no window is full: three tables alike");
        assert_eq!(terms.num_tokens(560, 4096), 2 * 4096);
        assert_eq!(terms.num_blocks(2 * 4096 + 160, 4096), 560 + 30);
        assert_eq!((TERMS.num_tokens(10, 4096), TERMS.num_blocks(161, 4096)), (160, 11));
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
