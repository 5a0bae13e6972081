//! The least of a GGUF reader: metadata only, trusting the file. The real one lives in the model
//! room, which this crate may not depend on.

use std::collections::HashMap;
use std::fs::File;
use std::io::{BufReader, Read};
use std::path::Path;

use inflight_tokenizer::GgufVocab;

enum Meta {
    Bool(bool),
    Integer(i64),
    Float(f64),
    Text(String),
    List(Vec<Meta>),
}

/// Reads the tokenizer's share of a GGUF file's metadata.
pub(crate) fn read_vocab(path: &Path) -> GgufVocab {
    let file = File::open(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let mut reader = Reader(BufReader::new(file));
    assert_eq!(&reader.bytes::<4>(), b"GGUF", "{}", path.display());
    let (_version, _num_tensors) = (reader.u32(), reader.u64());
    let mut meta = HashMap::new();
    for _ in 0..reader.u64() {
        let key = reader.text();
        let kind = reader.u32();
        meta.insert(key, reader.value(kind));
    }
    let mut vocab = Vocab(meta);
    GgufVocab {
        model: vocab.text("model").expect("a tokenizer"),
        pre: vocab.text("pre"),
        tokens: vocab.texts("tokens"),
        scores: vocab.list("scores", |v| if let Meta::Float(x) = v { x as f32 } else { 0.0 }),
        token_types: vocab
            .list("token_type", |v| if let Meta::Integer(x) = v { x as i32 } else { 0 }),
        merges: vocab.texts("merges"),
        bos: vocab.id("bos_token_id"),
        eos: vocab.id("eos_token_id"),
        unk: vocab.id("unknown_token_id"),
        pad: vocab.id("padding_token_id"),
        add_bos: vocab.flag("add_bos_token"),
        add_eos: vocab.flag("add_eos_token"),
        add_space_prefix: vocab.flag("add_space_prefix"),
        chat_template: match vocab.0.remove("tokenizer.chat_template") {
            Some(Meta::Text(text)) => Some(text),
            _ => None,
        },
        extra_eog: ["eot_token_id", "eom_token_id"]
            .iter()
            .filter_map(|key| vocab.id(key))
            .collect(),
    }
}

struct Vocab(HashMap<String, Meta>);

impl Vocab {
    fn take(&mut self, key: &str) -> Option<Meta> {
        self.0.remove(&format!("tokenizer.ggml.{key}"))
    }

    fn text(&mut self, key: &str) -> Option<String> {
        match self.take(key)? {
            Meta::Text(text) => Some(text),
            _ => panic!("{key} is no text"),
        }
    }

    fn flag(&mut self, key: &str) -> Option<bool> {
        match self.take(key)? {
            Meta::Bool(flag) => Some(flag),
            _ => panic!("{key} is no flag"),
        }
    }

    fn id(&mut self, key: &str) -> Option<u32> {
        match self.take(key)? {
            Meta::Integer(id) => u32::try_from(id).ok(),
            _ => panic!("{key} is no id"),
        }
    }

    fn list<T>(&mut self, key: &str, convert: impl Fn(Meta) -> T) -> Vec<T> {
        match self.take(key) {
            Some(Meta::List(items)) => items.into_iter().map(convert).collect(),
            _ => Vec::new(),
        }
    }

    fn texts(&mut self, key: &str) -> Vec<String> {
        self.list(key, |item| match item {
            Meta::Text(text) => text,
            _ => panic!("{key} holds other than texts"),
        })
    }
}

struct Reader(BufReader<File>);

impl Reader {
    fn bytes<const N: usize>(&mut self) -> [u8; N] {
        let mut bytes = [0; N];
        self.0.read_exact(&mut bytes).expect("the file is whole");
        bytes
    }

    fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.bytes())
    }

    fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.bytes())
    }

    fn text(&mut self) -> String {
        let mut bytes = vec![0; self.u64() as usize];
        self.0.read_exact(&mut bytes).expect("the file is whole");
        String::from_utf8(bytes).expect("GGUF strings are UTF-8")
    }

    fn value(&mut self, kind: u32) -> Meta {
        match kind {
            0 => Meta::Integer(self.bytes::<1>()[0].into()),
            1 => Meta::Integer(i8::from_le_bytes(self.bytes()).into()),
            2 => Meta::Integer(u16::from_le_bytes(self.bytes()).into()),
            3 => Meta::Integer(i16::from_le_bytes(self.bytes()).into()),
            4 => Meta::Integer(self.u32().into()),
            5 => Meta::Integer(i32::from_le_bytes(self.bytes()).into()),
            6 => Meta::Float(f32::from_le_bytes(self.bytes()).into()),
            7 => Meta::Bool(self.bytes::<1>()[0] != 0),
            8 => Meta::Text(self.text()),
            9 => {
                let (kind, len) = (self.u32(), self.u64());
                Meta::List((0..len).map(|_| self.value(kind)).collect())
            }
            10 | 11 => Meta::Integer(self.u64() as i64),
            12 => Meta::Float(f64::from_le_bytes(self.bytes())),
            _ => panic!("metadata kind {kind}"),
        }
    }
}
