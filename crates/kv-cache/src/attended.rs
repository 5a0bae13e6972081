//! Keeping of a prompt what its end attends to.

use crate::blocks_for;

/// Once a prompt is computed, only so many of its tokens stay: the last ones, and for each layer
/// and key/value head those that the last ones attend to most.
///
/// Tokens keep the positions that they had; what is generated later all stays.
///
/// # Source
/// Li et al., "SnapKV: LLM Knows What You are Looking for Before Generation", 2024, section 4.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Attended {
    prompt_len: usize,
    /// A multiple of a block.
    num_kept: usize,
    num_observed: usize,
}

impl Attended {
    /// Tokens at a prompt's end whose attention decides, and which stay.
    pub const OBSERVED: usize = 32;

    /// At least `num_kept` tokens of a prompt, in whole blocks, of which `num_observed` are its
    /// last ones.
    ///
    /// # Panics
    /// When not more are kept than observed, or `block_size` is zero.
    #[must_use]
    pub fn new(prompt_len: usize, num_kept: usize, num_observed: usize, block_size: usize) -> Self {
        assert!(
            num_kept > num_observed,
            "what observes stays, and so does something it attends to"
        );
        let num_kept = blocks_for(num_kept, block_size).saturating_mul(block_size);
        Self { prompt_len, num_kept, num_observed }
    }

    /// Whether the prompt has more tokens than are to stay.
    #[must_use]
    pub fn is_cut(&self) -> bool {
        self.prompt_len > self.num_kept
    }

    /// Tokens of a prompt that stay if it is cut.
    #[must_use]
    pub fn num_kept(&self) -> usize {
        self.num_kept
    }

    /// Tokens of the prompt.
    #[must_use]
    pub fn prompt_len(&self) -> usize {
        self.prompt_len
    }

    /// Tokens at its end that decide: they are computed in one row.
    #[must_use]
    pub fn num_observed(&self) -> usize {
        self.num_observed
    }

    /// Tokens that a row which begins at `start` may have if it could have `len`: all that decide,
    /// or none of them, and none behind the prompt with some of it.
    #[must_use]
    pub fn row_len(&self, start: usize, len: usize) -> usize {
        if !self.is_cut() || start >= self.prompt_len {
            return len;
        }
        let len = len.min(self.prompt_len - start);
        let observed = self.prompt_len.saturating_sub(self.num_observed);
        let ends_between = start + len > observed && start + len < self.prompt_len;
        if ends_between { observed.saturating_sub(start) } else { len }
    }

    pub(crate) fn num_dropped(&self, start: usize) -> usize {
        if self.is_cut() && start >= self.prompt_len { self.prompt_len - self.num_kept } else { 0 }
    }

    pub(crate) fn reach(&self, start: usize) -> usize {
        if self.is_cut() && start < self.prompt_len { self.prompt_len } else { usize::MAX }
    }

    /// When the prompt is cut, what stays is there twice for a moment.
    pub(crate) fn most_blocks(&self, num_tokens: usize, block_size: usize) -> usize {
        let all = blocks_for(num_tokens, block_size);
        if !self.is_cut() || num_tokens < self.prompt_len {
            return all;
        }
        let at_the_cut = blocks_for(self.prompt_len, block_size) + self.num_kept / block_size;
        let later = blocks_for(num_tokens - (self.prompt_len - self.num_kept), block_size);
        at_the_cut.max(later)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn those_that_decide_share_a_row() {
        let attended = Attended::new(100, 40, 32, 16);
        assert_eq!((attended.num_kept(), attended.is_cut()), (48, true));
        let lens = [(0, 60), (0, 68), (0, 69), (0, 99), (0, 100), (60, 20), (68, 31), (68, 40)];
        let expected = [60, 68, 68, 68, 100, 8, 0, 32];
        assert_eq!(lens.map(|(start, len)| attended.row_len(start, len)), expected);
        assert_eq!(Attended::new(48, 40, 32, 16).row_len(20, 10), 10, "a short prompt stays whole");
    }

    #[test]
    fn blocks_at_the_cut_and_later() {
        let attended = Attended::new(100, 48, 32, 16);
        let blocks = [99, 100, 101, 300].map(|len| attended.most_blocks(len, 16));
        assert_eq!(blocks, [7, 7 + 3, 10, 16]);
        assert_eq!((attended.num_dropped(99), attended.num_dropped(100)), (0, 52));
    }
}
