//! How a row's token is drawn, as the device reads it.

/// How one sampled row's token is drawn. All neutral: greedy.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SamplingRow {
    /// Where the sequence's token counts are; `None`: no penalty applies.
    pub state_slot: Option<u32>,
    /// 0: greedy.
    pub temperature: f32,
    /// Keep the k likeliest tokens; 0: all.
    pub top_k: u32,
    /// Keep the likeliest tokens whose probabilities reach this sum; 1: all.
    pub top_p: f32,
    /// Keep tokens at least this fraction as likely as the likeliest; 0: all.
    pub min_p: f32,
    /// Divides positive and multiplies negative logits of tokens seen in prompt or output; 1: none.
    pub repetition_penalty: f32,
    /// Subtracted from logits of tokens seen in the output.
    pub presence_penalty: f32,
    /// Subtracted from logits of tokens, once per time seen in the output.
    pub frequency_penalty: f32,
    /// With `position`, keys the draw.
    pub seed: u64,
    /// Position of the token being drawn.
    pub position: u32,
    /// How many of the likeliest tokens to report; `None`: no logprobs at all.
    pub top_logprobs: Option<u32>,
    /// First entry in `bias_ids`.
    pub bias_start: u32,
    /// Entries in `bias_ids`.
    pub bias_len: u32,
    /// Keep tokens as surprising as tokens are on average, until their probabilities reach this
    /// sum; 1: all.
    pub typical_p: f32,
    /// Keep tokens whose logits are at most so many standard deviations below the greatest; 0: all.
    pub top_n_sigma: f32,
    /// How often the likeliest tokens are left out; 0: never.
    pub xtc_probability: f32,
    /// Those that are left out are this likely or more; the least likely of them stays.
    pub xtc_threshold: f32,
    /// Its row of the step's [late inputs](crate::late); `None`: it has none.
    pub late_row: Option<u32>,
}

impl SamplingRow {
    /// Words of one row.
    pub const WORDS: usize = 20;

    /// Greedy, nothing reported.
    pub const GREEDY: Self = Self {
        state_slot: None,
        temperature: 0.0,
        top_k: 0,
        top_p: 1.0,
        min_p: 0.0,
        repetition_penalty: 1.0,
        presence_penalty: 0.0,
        frequency_penalty: 0.0,
        seed: 0,
        position: 0,
        top_logprobs: None,
        bias_start: 0,
        bias_len: 0,
        late_row: None,
        typical_p: 1.0,
        top_n_sigma: 0.0,
        xtc_probability: 0.0,
        xtc_threshold: 0.0,
    };

    /// Whether some rule must see the whole distribution before it can leave tokens out.
    pub fn is_unusual(&self) -> bool {
        self.typical_p < 1.0 || self.top_n_sigma > 0.0 || self.xtc_probability > 0.0
    }

    /// As words.
    pub fn to_words(self) -> [u32; Self::WORDS] {
        [
            self.state_slot.unwrap_or(u32::MAX),
            self.temperature.to_bits(),
            self.top_k,
            self.top_p.to_bits(),
            self.min_p.to_bits(),
            self.repetition_penalty.to_bits(),
            self.presence_penalty.to_bits(),
            self.frequency_penalty.to_bits(),
            self.seed as u32,
            (self.seed >> 32) as u32,
            self.position,
            self.top_logprobs.unwrap_or(u32::MAX),
            self.bias_start,
            self.bias_len,
            self.late_row.unwrap_or(u32::MAX),
            self.typical_p.to_bits(),
            self.top_n_sigma.to_bits(),
            self.xtc_probability.to_bits(),
            self.xtc_threshold.to_bits(),
            0,
        ]
    }

    /// From [`SamplingRow::to_words`].
    pub fn from_words(words: &[u32]) -> Self {
        let optional = |word: u32| (word != u32::MAX).then_some(word);
        Self {
            state_slot: optional(words[0]),
            temperature: f32::from_bits(words[1]),
            top_k: words[2],
            top_p: f32::from_bits(words[3]),
            min_p: f32::from_bits(words[4]),
            repetition_penalty: f32::from_bits(words[5]),
            presence_penalty: f32::from_bits(words[6]),
            frequency_penalty: f32::from_bits(words[7]),
            seed: u64::from(words[8]) | (u64::from(words[9]) << 32),
            position: words[10],
            top_logprobs: optional(words[11]),
            bias_start: words[12],
            bias_len: words[13],
            late_row: optional(words[14]),
            typical_p: f32::from_bits(words[15]),
            top_n_sigma: f32::from_bits(words[16]),
            xtc_probability: f32::from_bits(words[17]),
            xtc_threshold: f32::from_bits(words[18]),
        }
    }
}
