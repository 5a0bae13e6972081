//! Safetensors folders, good and bad.

#![allow(clippy::unwrap_used, reason = "a failure here fails the test")]

mod support;

use inflight_backend::Dtype;
use inflight_model::{SafetensorsFolder, Weights};
use proptest::prelude::*;
use serde_json::{Value, json};
use support::{TempFolder, assert_holds, message};

/// A file of this header and data.
fn file(header: &Value, data: &[u8]) -> Vec<u8> {
    let header = header.to_string();
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), data].concat()
}

fn tensor(dtype: &str, shape: &[usize], start: usize, end: usize) -> Value {
    json!({ "dtype": dtype, "shape": shape, "data_offsets": [start, end] })
}

/// `a` in F32, `b` in F16, `c` in BF16.
fn small() -> Vec<u8> {
    let header = json!({
        "__metadata__": { "format": "pt" },
        "a": tensor("F32", &[2], 0, 8),
        "b": tensor("F16", &[1, 2], 8, 12),
        "c": tensor("BF16", &[2, 1], 12, 16),
        "d": tensor("I64", &[1], 16, 24),
    });
    let mut data = [1.5f32.to_le_bytes(), (-2f32).to_le_bytes()].concat();
    data.extend([0x00, 0x3c, 0x00, 0xc0, 0x80, 0x3f, 0x49, 0xc0]);
    data.extend(7u64.to_le_bytes());
    file(&header, &data)
}

#[test]
fn a_single_file() {
    let folder = TempFolder::new();
    folder.write("model.safetensors", small());
    let weights = SafetensorsFolder::open(folder.path()).unwrap();
    assert_eq!(weights.names().collect::<Vec<_>>(), ["a", "b", "c", "d"]);
    let check = |name: &str, dtype: Dtype, values: &[f32]| {
        let tensor = weights.tensor(name).unwrap();
        assert_eq!((tensor.dtype, tensor.to_f32().as_slice()), (dtype, values));
    };
    check("a", Dtype::F32, &[1.5, -2.0]);
    check("b", Dtype::F16, &[1.0, -2.0]);
    check("c", Dtype::BF16, &[1.0, -3.140_625]);
    assert_holds(&message(weights.tensor("d")), &["model.safetensors", "tensor d", "I64"]);
    assert_holds(&message(weights.tensor("e")), &["tensor e is missing"]);

    let weights = Weights::Safetensors(weights);
    assert_eq!(weights.tensor("b", &[1, 2]).unwrap().shape, [1, 2]);
    let text = message(weights.tensor("b", &[2, 1]));
    assert_holds(&text, &["model.safetensors", "tensor b", "[1, 2]", "[2, 1]"]);
}

#[test]
fn fp8_needs_scales_that_fit() {
    let folder = TempFolder::new();
    let open = |name: &str, kind: &str, shape: &[usize], scales: &[u8]| {
        let header = json!({
            "w.weight": tensor("F8_E4M3", &[2, 2], 0, 4),
            name: tensor(kind, shape, 4, 4 + scales.len()),
        });
        // 1, 2, -1, 448.
        folder.write(
            "model.safetensors",
            file(&header, &[&[0x38, 0x40, 0xb8, 0x7e], scales].concat()),
        );
        SafetensorsFolder::open(folder.path()).unwrap().tensor("w.weight")
    };
    let half = 0.5f32.to_le_bytes();
    for (name, shape) in [("w.weight_scale", &[][..]), ("w.weight_scale_inv", &[1, 1])] {
        let tensor = open(name, "F32", shape, &half).unwrap();
        assert_eq!((tensor.dtype, tensor.to_f32()), (Dtype::F8E4M3, vec![0.5, 1.0, -0.5, 224.0]));
    }
    let tensor = open("w.weight_scale", "BF16", &[2, 1], &[0x80, 0x3f, 0x00, 0x40]).unwrap();
    assert_eq!(tensor.to_f32(), [1.0, 2.0, -2.0, 896.0]);
    let check = |result, expected: &[&str]| assert_holds(&message(result), expected);
    check(open("other", "F32", &[1], &half), &["w.weight_scale is missing"]);
    let three = half.repeat(3);
    check(open("w.weight_scale", "F32", &[3], &three), &["w.weight_scale", "[3]", "[2, 2]"]);
    check(open("w.weight_scale", "F8_E4M3", &[1], &[0x38]), &["w.weight_scale", "F8_E4M3"]);
    check(open("w.weight_scale", "F32", &[], &f32::NAN.to_le_bytes()), &["w.weight_scale"]);
}

#[test]
fn shards_are_found_by_their_index() {
    let folder = TempFolder::new();
    let shard = |name: &str, value: f32| {
        file(&json!({ name: tensor("F32", &[1], 0, 4) }), &value.to_le_bytes())
    };
    folder.write("1.safetensors", shard("a", 1.0));
    folder.write("2.safetensors", shard("b", 2.0));
    let index = |map: Value| {
        let index = json!({ "metadata": { "total_size": 8 }, "weight_map": map });
        folder.write("model.safetensors.index.json", index.to_string());
        SafetensorsFolder::open(folder.path())
    };
    let weights = index(json!({ "a": "1.safetensors", "b": "2.safetensors" })).unwrap();
    assert_eq!(weights.tensor("b").unwrap().to_f32(), [2.0]);
    assert!(weights.path_of("b").ends_with("2.safetensors"));

    let text = message(index(json!({ "a": "2.safetensors" })));
    assert_holds(&text, &["2.safetensors", "tensor a is missing"]);
    let text = message(index(json!({ "a": "3.safetensors" })));
    assert_holds(&text, &["3.safetensors", "No such file"]);
    for shard in ["../1.safetensors", "/etc/passwd", "x/../1.safetensors", "", "..", "x/", "a\\b"] {
        let text = message(index(json!({ "a": shard })));
        assert_holds(&text, &["index.json", "tensor a", "not the name of a file in the folder"]);
    }
    folder.write("model.safetensors.index.json", "[1]");
    assert_holds(&message(SafetensorsFolder::open(folder.path())), &["index.json"]);
}

#[test]
fn folders_without_weights() {
    let folder = TempFolder::new();
    let text = message(SafetensorsFolder::open(folder.path()));
    assert_holds(&text, &["model.safetensors", "model.safetensors.index.json"]);
}

#[test]
fn hostile_headers_are_refused() {
    let check = |bytes: Vec<u8>, expected: &str| {
        let folder = TempFolder::new();
        folder.write("model.safetensors", bytes);
        let text = message(SafetensorsFolder::open(folder.path()));
        assert_holds(&text, &["model.safetensors", expected]);
    };
    let whole = small();
    check(vec![], "header");
    check(whole[..4].to_vec(), "header");
    check(whole[..whole.len() - 1].to_vec(), "incomplete");
    check(u64::MAX.to_le_bytes().to_vec(), "too large");
    check([&(1u64 << 20).to_le_bytes()[..], b"{}"].concat(), "length");
    check(file(&json!([1, 2]), &[]), "JSON");
    // Tensors that share bytes, leave gaps, or are of another size than their shape says.
    let two = |second| json!({ "a": tensor("F32", &[1], 0, 4), "b": second });
    check(file(&two(tensor("F32", &[1], 2, 6)), &[0; 6]), "offset");
    check(file(&two(tensor("F32", &[1], 8, 12)), &[0; 12]), "offset");
    check(file(&two(tensor("F32", &[2], 4, 8)), &[0; 8]), "shape");
    check(file(&two(tensor("F32", &[usize::MAX, 2], 4, 8)), &[0; 8]), "overflow");
}

proptest! {
    #[test]
    fn damaged_files_never_panic(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        end in any::<prop::sample::Index>(),
        truncate in prop::bool::weighted(0.2),
    ) {
        let mut bytes = small();
        for (place, byte) in changes {
            let place = place.index(bytes.len());
            bytes[place] = byte;
        }
        if truncate {
            bytes.truncate(end.index(bytes.len()));
        }
        let folder = TempFolder::new();
        folder.write("model.safetensors", &bytes);
        if let Ok(weights) = SafetensorsFolder::open(folder.path()) {
            for name in weights.names() {
                if let Ok(tensor) = weights.tensor(name) {
                    prop_assert!(tensor.to_f32().len() <= bytes.len());
                }
            }
        }
    }
}
