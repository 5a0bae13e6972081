//! Which tokens of a sequence keep their keys and values.

use crate::{Attended, blocks_for};

/// What stays in the KV cache of a sequence that goes on.
///
/// What a token sees must follow from its position alone, never from how a prompt was cut into
/// chunks. So all that is decided here is decided from the position at which a row begins.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Retention {
    /// Everything.
    #[default]
    All,
    /// What the model can still see: its layers look back on `window` tokens, the newest included.
    Window {
        /// Tokens that a token sees, itself among them.
        window: usize,
    },
    /// The first tokens and the latest ones, by choice: what the model would see of the rest is
    /// lost.
    Sinks(SinkWindow),
    /// Of the prompt what its end attends to most, and all that follows, by choice.
    Attended(Attended),
}

/// The first tokens of a sequence, to which attention clings, and a window of the latest ones.
///
/// The cache fills up; then as many tokens as make a *stride* go at once, the oldest behind the
/// sinks, and what is left moves up:
///
/// ```text
///   full           [ sinks | a | b | c | d ]
///   a stride less  [ sinks | b | c | d ]           the sinks' keys turn to where `a` began
///   full again     [ sinks | b | c | d | e ]
/// ```
///
/// So every token sees the sinks and of the tokens behind them the last `window - stride` at least,
/// `window` at most; and distances are those within the cache, whatever was left out between.
///
/// # Units
/// Tokens; multiples of a block.
///
/// # Source
/// Xiao et al., "Efficient Streaming Language Models with Attention Sinks", 2023, section 3.2.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SinkWindow {
    num_sinks: usize,
    window: usize,
    stride: usize,
}

/// A stride is this share of the window: shorter ones cut prompts into smaller chunks, longer ones
/// leave less of the window.
const STRIDES_PER_WINDOW: usize = 8;

impl SinkWindow {
    /// Sinks and a window of at least so many tokens, rounded up to blocks.
    ///
    /// # Panics
    /// When `block_size` is zero.
    #[must_use]
    pub fn new(num_sinks: usize, window: usize, block_size: usize) -> Self {
        let whole = |tokens: usize| blocks_for(tokens, block_size).saturating_mul(block_size);
        let window = whole(window.max(1));
        let stride = (window / STRIDES_PER_WINDOW / block_size).max(1) * block_size;
        Self { num_sinks: whole(num_sinks), window, stride }
    }

    /// Tokens at the start that stay.
    #[must_use]
    pub fn num_sinks(&self) -> usize {
        self.num_sinks
    }

    /// Tokens of the window.
    #[must_use]
    pub fn window(&self) -> usize {
        self.window
    }

    /// Tokens that go at once.
    #[must_use]
    pub fn stride(&self) -> usize {
        self.stride
    }

    /// Tokens that are in the cache at most.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.num_sinks.saturating_add(self.window)
    }

    /// Places that a sequence takes that goes on for long: the sinks are there twice, as they were
    /// computed and as they are seen.
    #[must_use]
    pub fn num_places(&self) -> usize {
        self.capacity().saturating_add(self.num_sinks)
    }

    fn num_dropped(&self, start: usize) -> usize {
        match start.checked_sub(self.capacity()) {
            None => 0,
            Some(beyond) => (beyond / self.stride + 1) * self.stride,
        }
    }
}

impl Retention {
    /// Tokens that are not in the cache any more when a row begins at position `start`: the first
    /// ones behind the sinks.
    #[must_use]
    pub fn num_dropped(&self, start: usize, block_size: usize) -> usize {
        match self {
            Self::All => 0,
            Self::Window { window } => {
                (start + 1).saturating_sub(*window) / block_size * block_size
            }
            Self::Sinks(sinks) => sinks.num_dropped(start),
            Self::Attended(attended) => attended.num_dropped(start),
        }
    }

    /// The same for another layer group than the first, whose layers look back so far; `None`: on
    /// everything. What goes by choice goes from all.
    #[must_use]
    pub fn of_group(self, window: Option<usize>) -> Self {
        match self {
            Self::All | Self::Window { .. } => {
                window.map_or(Self::All, |window| Self::Window { window })
            }
            Self::Sinks(_) | Self::Attended(_) => self,
        }
    }

    /// Position up to which a row that begins at `start` may reach, if it has at most `most`
    /// tokens.
    #[must_use]
    pub fn reach(&self, start: usize, most: usize) -> usize {
        match self {
            Self::All => usize::MAX,
            Self::Window { .. } => start.saturating_add(most),
            Self::Sinks(sinks) => sinks.capacity() + sinks.num_dropped(start),
            Self::Attended(attended) => attended.reach(start),
        }
    }

    /// Most blocks that a sequence holds at once until it has `num_tokens` tokens in all, if its
    /// rows have at most `most` tokens.
    #[must_use]
    pub fn most_blocks(&self, num_tokens: usize, most: usize, block_size: usize) -> usize {
        let all = blocks_for(num_tokens, block_size);
        match self {
            Self::All => all,
            Self::Window { window } => {
                all.min(blocks_for(window.saturating_add(most), block_size) + 1)
            }
            Self::Sinks(sinks) if num_tokens <= sinks.capacity() => all,
            Self::Sinks(sinks) => blocks_for(sinks.num_places(), block_size),
            Self::Attended(attended) => attended.most_blocks(num_tokens, block_size),
        }
    }

    /// Whether blocks are let go of one by one until there are `num_tokens` tokens.
    #[must_use]
    pub fn lets_go(&self, num_tokens: usize) -> bool {
        match self {
            Self::All | Self::Attended(_) => false,
            Self::Window { window } => num_tokens > *window,
            Self::Sinks(sinks) => num_tokens > sinks.capacity(),
        }
    }

    /// Tokens from the start whose keys and values are what they would be if all were kept.
    #[must_use]
    pub fn num_exact(&self) -> usize {
        match self {
            Self::All | Self::Window { .. } => usize::MAX,
            Self::Sinks(sinks) => sinks.capacity(),
            Self::Attended(attended) if attended.is_cut() => attended.prompt_len(),
            Self::Attended(_) => usize::MAX,
        }
    }

    /// The cut that a prompt is to get, if it is to get one.
    #[must_use]
    pub fn cut(&self) -> Option<Attended> {
        match self {
            Self::Attended(attended) if attended.is_cut() => Some(*attended),
            Self::All | Self::Window { .. } | Self::Sinks(_) | Self::Attended(_) => None,
        }
    }

    /// Most tokens from the start that a sequence can be found to have: what decides over a cut is
    /// computed.
    #[must_use]
    pub fn most_found(&self) -> usize {
        match self.cut() {
            Some(cut) => cut.prompt_len() - cut.num_observed() + 1,
            None => self.num_exact(),
        }
    }

    /// Tokens at the start that stay, and whose keys turn when others go.
    #[must_use]
    pub fn num_sinks(&self) -> usize {
        match self {
            Self::All | Self::Window { .. } | Self::Attended(_) => 0,
            Self::Sinks(sinks) => sinks.num_sinks(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sinks_and_window_are_whole_blocks() {
        let sinks = SinkWindow::new(4, 1000, 16);
        assert_eq!((sinks.num_sinks, sinks.window, sinks.stride), (16, 1008, 112));
        assert_eq!((sinks.capacity(), sinks.num_places()), (1024, 1040));
        let least = SinkWindow::new(0, 0, 16);
        assert_eq!((least.num_sinks, least.window, least.stride), (0, 16, 16));
    }

    /// Whatever the position, the row's first token sees between seven eighths of the window and
    /// the window, itself included, and a row ends where the next stride goes.
    #[test]
    fn what_is_seen_follows_from_the_position() {
        let sinks = SinkWindow::new(4, 128, 16);
        let retention = Retention::Sinks(sinks);
        for start in 0..2000 {
            let dropped = retention.num_dropped(start, 16);
            let seen = start + 1 - dropped;
            assert!(seen <= 144, "{seen} of {start}");
            assert!(start < 144 || seen > 128, "{seen} of {start}");
            let reach = retention.reach(start, 7);
            assert_eq!(retention.num_dropped(reach - 1, 16), dropped);
            assert!(retention.num_dropped(reach, 16) > dropped);
        }
    }

    #[test]
    fn what_no_layer_sees_goes() {
        let window = Retention::Window { window: 20 };
        let dropped = [0, 19, 34, 35, 36, 51, 1000].map(|start| window.num_dropped(start, 16));
        // The token at 35 sees positions 16 to 35.
        assert_eq!(dropped, [0, 0, 0, 16, 16, 32, 976]);
        // 20 tokens before and a chunk of 32 may lie in five blocks.
        assert_eq!(window.most_blocks(1000, 32, 16), 5);
        assert_eq!(window.most_blocks(30, 32, 16), 2);
        assert_eq!(Retention::All.most_blocks(1000, 32, 16), 63);
    }

    #[test]
    fn sinks_are_counted_twice_once_they_turn() {
        let sinks = Retention::Sinks(SinkWindow::new(4, 128, 16));
        let blocks = [0, 144, 145, 100_000].map(|len| sinks.most_blocks(len, 32, 16));
        assert_eq!(blocks, [0, 9, 10, 10]);
    }
}
