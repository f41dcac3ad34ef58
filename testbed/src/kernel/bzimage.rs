//! Extraction of the kernel from a bzImage (Documentation/arch/x86/boot.rst).

use std::fs::{self, File};
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result, bail};

use crate::command;

/// Unpacks the kernel of `image` to `vmlinux`.
pub(super) fn unpack(image: &Path, vmlinux: &Path) -> Result<()> {
    let bytes = fs::read(image).with_context(|| format!("cannot read {}", image.display()))?;
    let payload =
        payload(&bytes).with_context(|| format!("{} is not a bzImage", image.display()))?;
    let tool = match payload {
        [0xfd, b'7', b'z', b'X', ..] => "xz",
        [0x28, 0xb5, 0x2f, 0xfd, ..] => "zstd",
        [0x1f, 0x8b, ..] => "gzip",
        other => {
            let start = &other[..other.len().min(4)];
            bail!(
                "{} has an unknown compression: its payload starts with {start:x?}",
                image.display()
            )
        }
    };
    let packed = vmlinux.with_extension("packed");
    fs::write(&packed, payload)?;
    let unpacked = command::run(
        Command::new(tool).arg("-dc").stdin(File::open(&packed)?).stdout(File::create(vmlinux)?),
    );
    fs::remove_file(packed)?;
    unpacked
}

/// Returns the compressed kernel. `payload_offset` counts from the end of the boot sectors, of
/// which there are `setup_sects` plus one. The last four bytes of `payload_length` are the unpacked
/// size, which only gzip counts as its own.
fn payload(image: &[u8]) -> Option<&[u8]> {
    let integer =
        |at: usize| Some(u32::from_le_bytes(image.get(at..at + 4)?.try_into().ok()?) as usize);
    let sectors = usize::from(*image.get(0x1f1)?) + 1;
    let start = sectors * 512 + integer(0x248)?;
    image.get(start..start + integer(0x24c)?.checked_sub(4)?)
}
