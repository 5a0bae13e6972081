//! One sequence's tokens to text that may be shown.

use inflight_tokenizer::{
    DecodeOptions, DecodeStream, StopMatcher, TextPosition, Tokenizer, TokenizerError,
};

/// How a sequence's tokens become text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct TextOptions {
    /// Strings that end the text.
    pub(crate) stops: Vec<String>,
    /// Tokens that end the output: those that the engine was told.
    pub(crate) stop_token_ids: Vec<u32>,
    /// Whether what ended the text is part of it.
    pub(crate) include_stop: bool,
    /// Text of the first `min_tokens` tokens is not searched for stop strings.
    pub(crate) min_tokens: usize,
    /// Whether control tokens are left out.
    pub(crate) skip_special_tokens: bool,
    /// Control tokens that are not: marks that are looked for in the text.
    pub(crate) shown_ids: Vec<u32>,
    /// Whether the text continues another or starts.
    pub(crate) position: TextPosition,
}

/// Decodes tokens as they come and holds back what may become a stop string.
pub(crate) struct TextStream {
    decoder: DecodeStream,
    matcher: StopMatcher,
    stop_token_ids: Vec<u32>,
    shown_ids: Vec<u32>,
    include_stop: bool,
    min_tokens: usize,
    num_tokens: usize,
    num_chars: usize,
}

impl TextStream {
    /// Starts a text.
    ///
    /// # Errors
    /// An empty stop string.
    pub(crate) fn new(
        tokenizer: &Tokenizer,
        options: &TextOptions,
    ) -> Result<Self, TokenizerError> {
        let decode = DecodeOptions {
            skip_special_tokens: options.skip_special_tokens,
            position: options.position,
        };
        Ok(Self {
            decoder: tokenizer.decode_stream(decode),
            matcher: StopMatcher::new(&options.stops)?.include_stop(options.include_stop),
            stop_token_ids: options.stop_token_ids.clone(),
            shown_ids: options.shown_ids.clone(),
            include_stop: options.include_stop,
            min_tokens: options.min_tokens,
            num_tokens: 0,
            num_chars: 0,
        })
    }

    /// Takes the next token and returns the text that may now be shown.
    pub(crate) fn push(&mut self, token: u32) -> String {
        self.num_tokens += 1;
        if self.stop_token_ids.contains(&token) && !self.include_stop {
            return String::new();
        }
        let is_shown = self.shown_ids.contains(&token);
        let decoder = &mut self.decoder;
        let piece = if is_shown { decoder.push_shown(token) } else { decoder.push(token) };
        self.show(piece)
    }

    /// Ends the text: what was held back is shown, unless it ends by being a stop string after all.
    pub(crate) fn finish(&mut self) -> String {
        let piece = self.decoder.finish();
        let mut text = self.show(piece);
        if self.stopped_by().is_none() {
            text += &self.matcher.finish();
        }
        text
    }

    /// The stop string that was met, by its place in the list.
    pub(crate) fn stopped_by(&self) -> Option<usize> {
        self.matcher.stopped_by()
    }

    /// Characters decoded so far, those that are held back included.
    pub(crate) fn num_chars(&self) -> usize {
        self.num_chars
    }

    fn show(&mut self, piece: String) -> String {
        self.num_chars += piece.chars().count();
        if self.num_tokens <= self.min_tokens { piece } else { self.matcher.push(&piece).text }
    }
}
