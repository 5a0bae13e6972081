//! Machine code, and what it says of its needs.

use crate::KernelError;

/// One compiled kernel: an ELF file for `cuModuleLoadData`.
#[derive(Clone, Debug)]
pub struct Cubin {
    bytes: Vec<u8>,
    log: String,
}

/// What a kernel needs of the machine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Resources {
    /// Registers of a thread.
    pub registers: u32,
    /// Shared memory declared in the source, in bytes.
    pub static_smem: u32,
    /// Local memory of a thread, in bytes: spilled registers and arrays with run-time indices.
    pub frame: u32,
    /// Bytes of the parameters.
    pub params: u32,
}

impl Cubin {
    pub(crate) fn new(bytes: Vec<u8>) -> Result<Self, KernelError> {
        Self::with_log(bytes, String::new())
    }

    pub(crate) fn with_log(bytes: Vec<u8>, log: String) -> Result<Self, KernelError> {
        if !bytes.starts_with(b"\x7fELF\x02\x01") {
            return Err(KernelError::BadCubin("not a little-endian 64-bit ELF file"));
        }
        Ok(Self { bytes, log })
    }

    /// The file.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// What the compiler said; empty if the kernel came from the cache.
    pub fn log(&self) -> &str {
        &self.log
    }

    /// The needs of kernel `entry`.
    ///
    /// # Errors
    /// [`KernelError::BadCubin`] if the file is damaged or has no such kernel.
    ///
    /// # Source
    /// Section and attribute numbers: the `EIATTR` names that `cuobjdump -elf` prints.
    pub fn resources(&self, entry: &str) -> Result<Resources, KernelError> {
        let elf = Elf { bytes: &self.bytes };
        let sections = elf.sections()?;
        let find = |prefix: &str| {
            let name = format!("{prefix}{entry}");
            sections.iter().find(|section| section.name == name.as_bytes())
        };
        let text = find(".text.").ok_or(KernelError::BadCubin("no such kernel"))?;
        // From Hopper on, the section begins with a kilobyte that the driver keeps for itself.
        let reserved = sections.iter().any(|section| section.name == b".nv.shared.reserved.0");
        let static_smem = find(".nv.shared.").map_or(0, |section| section.len as u32);
        // Since Hopper, attributes give the registers, and this field means something else.
        let mut resources = Resources {
            registers: if reserved { 0 } else { text.info >> 24 },
            static_smem: static_smem.saturating_sub(if reserved { 1024 } else { 0 }),
            ..Resources::default()
        };
        // Attributes of all functions: each names a symbol; a file holds one kernel.
        if let Some(section) = sections.iter().find(|section| section.name == b".nv.info") {
            for attribute in elf.attributes(section)? {
                match (attribute.code, attribute.words.as_slice()) {
                    (Attribute::FRAME_SIZE, [_, size, ..]) => {
                        resources.frame = resources.frame.max(*size);
                    }
                    (Attribute::REG_COUNT, [_, count, ..]) => {
                        resources.registers = resources.registers.max(*count);
                    }
                    _ => {}
                }
            }
        }
        if let Some(section) = find(".nv.info.") {
            for attribute in elf.attributes(section)? {
                // Index, place and ordinal, then the size above 18 bits of other things.
                if let (Attribute::PARAM, [_, _, packed]) =
                    (attribute.code, attribute.words.as_slice())
                {
                    resources.params += packed >> 18;
                }
            }
        }
        Ok(resources)
    }
}

struct Section<'a> {
    name: &'a [u8],
    /// `sh_info`; of a kernel's code the upper byte is its number of registers.
    info: u32,
    /// Bytes in memory, also where the file holds none.
    len: u64,
    /// Empty for sections without content.
    content: &'a [u8],
}

/// One entry of an `.nv.info` section.
struct Attribute {
    code: u8,
    /// What follows, if anything.
    words: Vec<u32>,
}

impl Attribute {
    const FRAME_SIZE: u8 = 0x11;
    const PARAM: u8 = 0x17;
    const REG_COUNT: u8 = 0x2f;
    /// Formats: inline values have no words after them.
    const HAS_WORDS: u8 = 0x04;
}

struct Elf<'a> {
    bytes: &'a [u8],
}

impl<'a> Elf<'a> {
    const NO_CONTENT: u32 = 8;

    fn slice(&self, start: u64, len: u64) -> Result<&'a [u8], KernelError> {
        let cut_off = KernelError::BadCubin("cut off");
        let Some(end) = start.checked_add(len) else { return Err(cut_off) };
        self.bytes.get(start as usize..end as usize).ok_or(cut_off)
    }

    fn number(&self, start: u64, len: usize) -> Result<u64, KernelError> {
        let bytes = self.slice(start, len as u64)?;
        Ok(bytes.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte)))
    }

    fn sections(&self) -> Result<Vec<Section<'a>>, KernelError> {
        let table = self.number(0x28, 8)?;
        let entry_len = self.number(0x3a, 2)?;
        let (count, names) = (self.number(0x3c, 2)?, self.number(0x3e, 2)?);
        let field = |section: u64, at: u64, len| {
            let start = table.checked_add(section * entry_len + at);
            self.number(start.ok_or(KernelError::BadCubin("cut off"))?, len)
        };
        let content = |section| self.slice(field(section, 0x18, 8)?, field(section, 0x20, 8)?);
        let names = content(names)?;
        (0..count)
            .map(|section| {
                let name = names.get(field(section, 0, 4)? as usize..);
                let name = name.ok_or(KernelError::BadCubin("a name is missing"))?;
                let end = name.iter().position(|byte| *byte == 0).unwrap_or(name.len());
                let empty = field(section, 4, 4)? as u32 == Self::NO_CONTENT;
                Ok(Section {
                    name: &name[..end],
                    info: field(section, 0x2c, 4)? as u32,
                    len: field(section, 0x20, 8)?,
                    content: if empty { &[] } else { content(section)? },
                })
            })
            .collect()
    }

    fn attributes(&self, section: &Section<'_>) -> Result<Vec<Attribute>, KernelError> {
        let mut attributes = Vec::new();
        let mut rest = section.content;
        while let [format, code, low, high, tail @ ..] = rest {
            let value = u16::from_le_bytes([*low, *high]);
            let len = if *format == Attribute::HAS_WORDS { usize::from(value) } else { 0 };
            let words = tail.get(..len).ok_or(KernelError::BadCubin("an attribute is cut off"))?;
            let words = words.as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word));
            attributes.push(Attribute { code: *code, words: words.collect() });
            rest = &tail[len..];
        }
        Ok(attributes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn damaged_files_give_errors() {
        assert!(Cubin::new(b"not an ELF file".to_vec()).is_err());
        for len in [6, 64, 200] {
            for fill in [0, 0x7f, 0xff] {
                let mut bytes = vec![fill; len];
                bytes[..6].copy_from_slice(b"\x7fELF\x02\x01");
                let error = Cubin::new(bytes).unwrap().resources("kernel").unwrap_err();
                assert!(matches!(error, KernelError::BadCubin(_)));
            }
        }
    }
}
