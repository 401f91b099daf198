//! The header of a safetensors file.
//!
//! The safetensors crate checks types, shapes and offsets. Its own reader of JSON keeps the last of equal keys, and buffers
//! everything. The format forbids equal keys, so the header is read here.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fmt;

use anyhow::{Result, ensure};
use hopper_attention_benches::text::excerpt;
use safetensors::tensor::{Metadata, TensorInfo};
use serde::de::{Deserialize, Deserializer, Error, MapAccess, Visitor};

/// The key of what is no tensor.
const METADATA: &str = "__metadata__";
/// A key is cut to so many characters in an error.
const LONGEST: usize = 60;

/// What a header says.
pub fn parse(bytes: &[u8]) -> Result<Metadata> {
    ensure!(bytes.starts_with(b"{"), "it does not begin with `{{`, as the format demands");
    let Header { metadata, tensors } = serde_json::from_slice(bytes)?;
    let mut tensors: Vec<(String, TensorInfo)> = tensors.into_iter().collect();
    tensors.sort_by_key(|(_, info)| info.data_offsets);
    Ok(Metadata::new(metadata, tensors)?)
}

/// The tensors by name, and the metadata.
#[derive(Default)]
struct Header {
    metadata: Option<HashMap<String, String>>,
    tensors: HashMap<String, TensorInfo>,
}

impl<'de> Deserialize<'de> for Header {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(Self::default())
    }
}

impl<'de> Visitor<'de> for Header {
    type Value = Self;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a map of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(mut self, mut map: A) -> Result<Self, A::Error> {
        let mut seen = false;
        while let Some(key) = map.next_key::<String>()? {
            if key != METADATA {
                insert(&mut self.tensors, key, map.next_value()?)?;
            } else if !std::mem::replace(&mut seen, true) {
                self.metadata = map.next_value::<Option<Texts>>()?.map(|Texts(texts)| texts);
            } else {
                return Err(twice(METADATA));
            }
        }
        Ok(self)
    }
}

/// The metadata: texts by key.
#[derive(Default)]
struct Texts(HashMap<String, String>);

impl<'de> Deserialize<'de> for Texts {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(Self::default())
    }
}

impl<'de> Visitor<'de> for Texts {
    type Value = Self;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a map of texts")
    }

    fn visit_map<A: MapAccess<'de>>(mut self, mut map: A) -> Result<Self, A::Error> {
        while let Some((key, text)) = map.next_entry()? {
            insert(&mut self.0, key, text)?;
        }
        Ok(self)
    }
}

fn insert<V, E: Error>(map: &mut HashMap<String, V>, key: String, value: V) -> Result<(), E> {
    match map.entry(key) {
        Entry::Occupied(old) => Err(twice(old.key())),
        Entry::Vacant(place) => {
            place.insert(value);
            Ok(())
        }
    }
}

fn twice<E: Error>(key: &str) -> E {
    E::custom(format!("the key `{}` is there twice", excerpt(key, LONGEST)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(header: &str) -> String {
        format!("{:#}", parse(header.as_bytes()).expect_err("a bad header was read"))
    }

    #[test]
    fn equal_keys_are_refused_wherever_they_are() {
        let tensor = r#"{"dtype":"F32","shape":[1],"data_offsets":[0,4]}"#;
        let twice = format!(r#"{{"q":{tensor},"q":{tensor}}}"#);
        assert!(refusal(&twice).starts_with("the key `q` is there twice"), "{}", refusal(&twice));
        // The same key, written in another way.
        assert!(refusal(&twice.replacen("\"q\"", "\"\\u0071\"", 1)).starts_with("the key `q` is there twice"));
        let metadata = r#"{"__metadata__":{"layout":"bshd","layout":"bhsd"}}"#;
        assert!(refusal(metadata).starts_with("the key `layout` is there twice"));
        let twice = r#"{"__metadata__":{},"__metadata__":{}}"#;
        assert!(refusal(twice).starts_with("the key `__metadata__` is there twice"));
        let inner = r#"{"q":{"dtype":"F32","shape":[1],"shape":[1],"data_offsets":[0,4]}}"#;
        assert!(refusal(inner).starts_with("duplicate field `shape`"));
        assert!(parse(format!(r#"{{"__metadata__":{{"q":"x"}},"q":{tensor}}}"#).as_bytes()).is_ok());
    }

    #[test]
    fn only_blanks_after_the_header_are_padding() {
        assert!(parse(b"{}   ").is_ok());
        for header in [" {}", "\n{}", "\u{feff}{}", "", "[]"] {
            assert!(refusal(header).contains("begin with `{`"), "{header:?}");
        }
        assert!(!refusal("{} x").is_empty() && !refusal(&"{\"a\":[".repeat(200)).is_empty());
    }
}
