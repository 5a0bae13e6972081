//! Rules by which GGUF files of the `gpt2` family split text into words before merging.
//!
//! A file names its rule in `tokenizer.ggml.pre`. A rule is a list of patterns, applied one after
//! the other: each cuts the pieces left by the one before into its matches and what lies between.
//!
//! # Source
//! The names, and which patterns they stand for, are fixed by llama.cpp's `src/llama-vocab.cpp`,
//! the patterns themselves by the `tokenizer.json` of the models. Where the two differ (`tekken`,
//! `gpt-4o`: letter classes beyond ASCII), the model's own pattern is used.

use fancy_regex::Regex;

use crate::TokenizerError;

/// How one family of vocabularies splits and merges.
#[derive(Debug)]
pub(crate) struct PreRule {
    names: &'static [&'static str],
    patterns: &'static [&'static str],
    /// A word that is in the vocabulary is taken whole, whatever the merges say.
    pub(crate) ignore_merges: bool,
    /// Whether a text starts with BOS when the file does not say.
    pub(crate) adds_bos: bool,
}

/// Splits as GPT-2 does.
pub(crate) const GPT2: &str =
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";

const LLAMA3: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}",
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
);

const QWEN2: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}",
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
);

const QWEN35: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}",
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
);

const TEKKEN: &str = concat!(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
);

const GPT4O: &str = concat!(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
);

const DEEPSEEK_V3: &str = concat!(
    r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"##,
    r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
);

/// Cased letters, as the first DeepSeek models list them. By number: some of these characters
/// turn into others when a file is normalised.
const DEEPSEEK_LLM_WORD: &str = concat!(
    r"\s?[A-Za-z\x{B5}\x{C0}-\x{D6}\x{D8}-\x{F6}\x{F8}-\x{1BA}\x{1BC}-\x{1BF}\x{1C4}-\x{293}",
    r"\x{295}-\x{2AF}\x{370}-\x{373}\x{376}\x{377}\x{37B}-\x{37D}\x{37F}\x{386}\x{388}-\x{38A}",
    r"\x{38C}\x{38E}-\x{3A1}\x{3A3}-\x{3F5}\x{3F7}-\x{481}\x{48A}-\x{52F}\x{531}-\x{556}",
    r"\x{10A0}-\x{10C5}\x{13A0}-\x{13F5}\x{13F8}-\x{13FD}\x{1C90}-\x{1CBA}\x{1CBD}-\x{1CBF}",
    r"\x{1D00}-\x{1D2B}\x{1D6B}-\x{1D77}\x{1D79}-\x{1D9A}\x{1E00}-\x{1F15}\x{1F18}-\x{1F1D}",
    r"\x{1F20}-\x{1F45}\x{1F48}-\x{1F4D}\x{1F50}-\x{1F57}\x{1F59}\x{1F5B}\x{1F5D}",
    r"\x{1F5F}-\x{1F7D}\x{1F80}-\x{1FB4}\x{1FB6}-\x{1FBC}\x{1FBE}\x{1FC2}-\x{1FC4}",
    r"\x{1FC6}-\x{1FCC}\x{1FD0}-\x{1FD3}\x{1FD6}-\x{1FDB}\x{1FE0}-\x{1FEC}\x{1FF2}-\x{1FF4}",
    r"\x{1FF6}-\x{1FFC}\x{2102}\x{2107}\x{210A}-\x{2113}\x{2115}\x{2119}-\x{211D}\x{2124}",
    r"\x{2126}\x{2128}\x{212A}-\x{212D}\x{212F}-\x{2134}\x{2139}\x{213C}-\x{213F}",
    r"\x{2145}-\x{2149}\x{214E}\x{2183}\x{2184}\x{2C00}-\x{2C7B}\x{2C7E}-\x{2CE4}",
    r"\x{2CEB}-\x{2CEE}\x{2CF2}\x{2CF3}\x{A640}-\x{A66D}\x{A680}-\x{A69B}\x{A722}-\x{A76F}",
    r"\x{A771}-\x{A787}\x{A78B}-\x{A78E}\x{AB70}-\x{ABBF}\x{FB00}-\x{FB06}\x{FB13}-\x{FB17}",
    r"\x{FF21}-\x{FF3A}\x{FF41}-\x{FF5A}\x{10400}-\x{1044F}\x{104B0}-\x{104D3}",
    r"\x{104D8}-\x{104FB}\x{10C80}-\x{10CB2}\x{10CC0}-\x{10CF2}\x{118A0}-\x{118DF}",
    r"\x{1E900}-\x{1E943}]+",
);

const CJK: &str = r"[\x{4E00}-\x{9FA5}\x{800}-\x{4E00}\x{AC00}-\x{D7FF}]+";

const RULES: &[PreRule] = &[
    rule(&["default"], &[r"[\p{P}$+<=>^~|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"]),
    rule(
        &["gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling", "exaone4"],
        &[GPT2],
    ),
    rule(
        &["smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"],
        &[r"\p{N}", GPT2],
    ),
    takes_words_whole(
        &["llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2"],
        &[LLAMA3],
    ),
    rule(&["dbrx", "smaug-bpe", "glm4", "chatglm-bpe"], &[LLAMA3]),
    rule(
        &["qwen2", "deepseek-r1-qwen", "megrez", "stablelm2", "hunyuan", "solar-open", "grok-2"],
        &[QWEN2],
    ),
    rule(&["qwen35"], &[QWEN35]),
    takes_words_whole(&["tekken"], &[TEKKEN]),
    rule(&["gpt-4o", "llama4", "minimax-m2"], &[GPT4O]),
    rule(
        &["deepseek-llm"],
        &[
            r"[\r\n]",
            DEEPSEEK_LLM_WORD,
            r"\s?[!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3000}-\x{3002}]+",
            r"\s+$",
            CJK,
            r"\p{N}+",
        ],
    ),
    rule(&["deepseek-coder"], &[r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", CJK, r"\p{N}"]),
    rule(
        &["deepseek-v3", "hunyuan-dense", "joyai-llm"],
        &[r"\p{N}{1,3}", r"[\x{4E00}-\x{9FA5}\x{3040}-\x{309F}\x{30A0}-\x{30FF}]+", DEEPSEEK_V3],
    ),
    rule(&["falcon"], &[r"[\p{P}$+<=>^~|`]+", GPT2, "[0-9][0-9][0-9]"]),
];

const fn rule(names: &'static [&'static str], patterns: &'static [&'static str]) -> PreRule {
    PreRule { names, patterns, ignore_merges: false, adds_bos: false }
}

const fn takes_words_whole(
    names: &'static [&'static str],
    patterns: &'static [&'static str],
) -> PreRule {
    PreRule { names, patterns, ignore_merges: true, adds_bos: true }
}

/// The names that `tokenizer.ggml.pre` may have.
pub fn known_pre_tokenizers() -> impl Iterator<Item = &'static str> {
    RULES.iter().flat_map(|rule| rule.names).copied()
}

impl PreRule {
    /// Finds the rule that a file names; a file that names none is read by the default rule.
    pub(crate) fn find(pre: Option<&str>) -> Result<&'static Self, TokenizerError> {
        let name = pre.unwrap_or("default");
        RULES.iter().find(|rule| rule.names.contains(&name)).ok_or_else(|| {
            let known: Vec<_> = known_pre_tokenizers().collect();
            TokenizerError::UnknownPreTokenizer { pre: name.to_string(), known: known.join(", ") }
        })
    }

    /// Compiles the patterns.
    pub(crate) fn compile(&self) -> Vec<Regex> {
        let compile = |pattern: &&str| Regex::new(pattern).expect("a test compiles every rule");
        self.patterns.iter().map(compile).collect()
    }
}

/// Cuts `text` by each pattern in turn; the pieces cover it in order and none is empty.
pub(crate) fn split<'t>(patterns: &[Regex], text: &'t str) -> Result<Vec<&'t str>, TokenizerError> {
    let mut pieces = vec![text];
    for pattern in patterns {
        let mut finer = Vec::with_capacity(pieces.len());
        for piece in pieces {
            split_once(pattern, piece, &mut finer)?;
        }
        pieces = finer;
    }
    Ok(pieces)
}

fn split_once<'t>(
    pattern: &Regex,
    text: &'t str,
    pieces: &mut Vec<&'t str>,
) -> Result<(), TokenizerError> {
    let mut done = 0;
    for found in pattern.find_iter(text) {
        let found = found.map_err(|error| TokenizerError::Encode(error.to_string()))?;
        if found.start() > done {
            pieces.push(&text[done..found.start()]);
        }
        if found.end() > found.start() {
            pieces.push(found.as_str());
        }
        done = found.end();
    }
    if done < text.len() {
        pieces.push(&text[done..]);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(pre: &str, text: &str, expected: &[&str]) {
        let patterns = PreRule::find(Some(pre)).unwrap().compile();
        assert_eq!(split(&patterns, text).unwrap(), expected, "{pre}: {text:?}");
    }

    #[test]
    fn words_as_each_rule_cuts_them() {
        check("gpt-2", "I've 1234  x\n\n y", &["I", "'ve", " 1234", " ", " x", "\n\n", " y"]);
        check("smollm", "in 2024!", &["in", " ", "2", "0", "2", "4", "!"]);
        check("llama-bpe", "DON'T 12345", &["DON", "'T", " ", "123", "45"]);
        check("llama-bpe", "a  \n\n b", &["a", "  \n\n", " b"]);
        check("qwen2", "x=12\n", &["x", "=", "1", "2", "\n"]);
        check("tekken", "HelloWorld a/b", &["Hello", "World", " a", "/b"]);
        check("gpt-4o", "it's HTTPServer", &["it's", " HTTPServer"]);
        check("deepseek-coder", "if x:\n y", &["if", " x", ":", "\n", " y"]);
        // The punctuation of this rule spans `:-~` and so, as published, ASCII letters too.
        check("deepseek-llm", "ne nà 12\n", &["ne", " n", "à", " ", "12", "\n"]);
        check("deepseek-v3", "_foo 1234 日本", &["_foo", " ", "123", "4", " ", "日本"]);
        check("default", "a+b 1234", &["a", "+", "b", " ", "123", "4"]);
        check("falcon", "x1234", &["x", "123", "4"]);
    }

    #[test]
    fn an_unknown_rule_names_itself_and_the_known() {
        let message = PreRule::find(Some("klingon")).unwrap_err().to_string();
        assert!(message.contains("`klingon`") && message.contains("smollm"), "{message}");
        assert!(PreRule::find(None).is_ok());
    }

    #[test]
    fn every_rule_covers_hostile_texts_without_giving_up() {
        let long = [" ", "\t ", "A", "a'", "é", "É", "\r\n", "日", "7", "\u{301}", "!", "\u{3000}"];
        for rule in RULES {
            let patterns = rule.compile();
            for unit in long {
                let text = unit.repeat(300_000 / unit.len());
                let pieces = split(&patterns, &text).unwrap();
                assert_eq!(pieces.concat(), text, "{:?} on {unit:?}", rule.names);
            }
        }
    }
}
