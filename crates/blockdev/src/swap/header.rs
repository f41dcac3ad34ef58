//! The swap header that mkswap(8) writes.

use std::fs::OpenOptions;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use aquifer_page::{Bytes, PAGE_SIZE};

use super::SwapError;

/// Offset of the header's fields (`union swap_header` in `linux/swap.h`).
const INFO: usize = 1024;
const UUID: usize = INFO + 12;
const LABEL: usize = UUID + 16;
const MAGIC: &[u8; 10] = b"SWAPSPACE2";
const LABEL_LENGTH: usize = 16;

/// Writes a swap header, as mkswap(8) does, for `capacity` bytes of `device`. It keeps 15 bytes of
/// `label`.
pub fn format(device: &Path, capacity: Bytes, label: &str, uuid: u128) -> Result<(), SwapError> {
    let fail = |source| SwapError::Format { device: device.to_owned(), source };
    let header = header(capacity, label, uuid).map_err(fail)?;
    let file = OpenOptions::new().write(true).open(device).map_err(fail)?;
    file.write_all_at(&header, 0).and_then(|()| file.sync_all()).map_err(fail)
}

fn header(capacity: Bytes, label: &str, uuid: u128) -> io::Result<[u8; PAGE_SIZE]> {
    let pages = capacity.0 / PAGE_SIZE as u64;
    let invalid = |why: &str| io::Error::new(io::ErrorKind::InvalidInput, why);
    if pages < 10 {
        return Err(invalid("a swap device cannot be smaller than 40KiB"));
    }
    let last = u32::try_from(pages - 1)
        .map_err(|_| invalid("a swap device cannot be larger than 16TiB"))?;
    let mut page = [0; PAGE_SIZE];
    page[INFO..INFO + 4].copy_from_slice(&1u32.to_ne_bytes());
    page[INFO + 4..INFO + 8].copy_from_slice(&last.to_ne_bytes());
    page[UUID..LABEL].copy_from_slice(&uuid.to_be_bytes());
    let kept = label.len().min(LABEL_LENGTH - 1);
    page[LABEL..LABEL + kept].copy_from_slice(&label.as_bytes()[..kept]);
    page[PAGE_SIZE - MAGIC.len()..].copy_from_slice(MAGIC);
    Ok(page)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_too_small_or_too_large_for_swap_is_refused() {
        assert!(header(Bytes::kib(36), "", 0).is_err());
        assert!(header(Bytes::kib(40), "", 0).is_ok());
        assert!(header(Bytes::gib(16 << 10), "", 0).is_ok());
        assert!(header(Bytes::gib(17 << 10), "", 0).is_err());
    }

    #[test]
    fn a_long_label_is_cut_and_stays_terminated() {
        let page = header(Bytes::mib(64), "a-label-of-more-than-16-bytes", 0).unwrap();
        assert_eq!(&page[LABEL..LABEL + 16], b"a-label-of-more\0");
    }

    #[test]
    fn tools_recognise_the_header() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("swap");
        std::fs::File::create(&file).unwrap().set_len(64 << 20).unwrap();
        let uuid = 0x0011_2233_4455_6677_8899_aabb_ccdd_eeff;
        format(&file, Bytes::mib(64), "aquifer", uuid).unwrap();
        let output = std::process::Command::new("blkid")
            .args(["-p", "-o", "export"])
            .arg(&file)
            .output()
            .unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        for line in ["TYPE=swap", "LABEL=aquifer", "UUID=00112233-4455-6677-8899-aabbccddeeff"] {
            assert!(text.contains(line), "{line} is not in {text}");
        }
    }
}
