//! Tests of a disk cache by its clients. Clients read the bytes that they wrote, while the cache
//! grows and shrinks all the time.
//!
//! The tests need root. `AQUIFER_SECONDS` is the duration of the clients' work (4 by default).

use std::fs::{self, File};

use aquifer_disk_cache::{self as cache, ARRIVING, CacheError, Options, READ_ONLY, Service};
use aquifer_page::{Bytes, Group};

use crate::common::{Here, is_root, seconds, until, work};

#[test]
fn clients_read_their_writes_while_the_cache_resizes() {
    if !is_root() {
        return;
    }
    let here = Here::new(Bytes::mib(4));
    work(&here, seconds(), |chance| {
        let size = if chance.below(4) == 0 { 0 } else { chance.below(8 << 20) };
        here.resize(Bytes(size));
        true
    });
}

#[test]
fn read_pages_stay_cached_until_the_disk_is_closed() {
    if !is_root() {
        return;
    }
    let here = Here::new(Bytes::mib(8));
    let (path, content) = here.disk("disk", 1 << 20);
    let mut one = here.connect(&path);
    let mut read = vec![0; content.len()];
    for _ in 0..2 {
        one.read(0, &mut read).unwrap();
        assert!(read == content);
    }
    let status = here.status();
    let counts = status.counts;
    assert_eq!((counts.hits, counts.misses, status.used), (256, 256, Bytes::mib(1)));
    assert_eq!(counts.read_bytes, Bytes::mib(2));
    drop(one);
    until(|| here.status().disks.is_empty());
    assert_eq!(here.status().used, Bytes::ZERO);
    // A later client reads the file's new content.
    fs::write(&path, vec![7; 1 << 20]).unwrap();
    here.connect(&path).read(0, &mut read).unwrap();
    assert!(read.iter().all(|byte| *byte == 7));
}

#[test]
fn a_disk_is_read_by_all_or_written_by_one() {
    if !is_root() {
        return;
    }
    let here = Here::new(Bytes::mib(8));
    let (path, content) = here.disk("disk", 1 << 20);
    let to_read = format!("{READ_ONLY}{}", path.display());
    let (mut one, mut other) = (here.export(&to_read).unwrap(), here.export(&to_read).unwrap());
    assert!(one.is_read_only() && !one.can_trim());
    let mut read = vec![0; content.len()];
    for reader in [&mut one, &mut other] {
        reader.read(0, &mut read).unwrap();
        assert!(read == content);
    }
    assert_eq!(here.status().counts.hits, 256);
    assert!(one.write(0, &[1]).unwrap_err().to_string().contains("not permitted"));
    assert!(one.trim(0, 4096).unwrap_err().to_string().contains("does not release space"));
    one.read(0, &mut read).unwrap();
    assert!(read == content);
    let refused = here.export(path.to_str().unwrap()).unwrap_err().to_string();
    assert!(refused.contains("other VMs read"), "{refused}");
    drop((one, other));
    let mut writer = None;
    until(|| {
        writer = here.export(path.to_str().unwrap()).ok();
        writer.is_some()
    });
    let mut writer = writer.unwrap();
    assert!(!writer.is_read_only() && writer.can_multi_conn());
    writer.write(0, &[1]).unwrap();
    // Under another name it is the same disk.
    let link = here.dir.path().join("link");
    std::os::unix::fs::symlink(&path, &link).unwrap();
    here.connect(&link).read(0, &mut read).unwrap();
    assert_eq!(read[..2], [1, content[1]]);
    let refused = here.export(&to_read).unwrap_err().to_string();
    assert!(refused.contains(&format!("process {} has", std::process::id())), "{refused}");
    for (name, why) in [
        ("/no/such/file", "No such file"),
        ("disk", "no export"),
        ("", "no export"),
        ("/dev/null", "neither a file nor a block device"),
    ] {
        let refused = here.export(name).unwrap_err().to_string();
        assert!(refused.contains(why), "{refused}");
    }
}

#[test]
fn an_error_of_the_disk_is_one_of_its_client_and_of_nobody_else() {
    if !is_root() {
        return;
    }
    let here = Here::new(Bytes::mib(8));
    let (path, content) = here.disk("disk", 1 << 20);
    let mut client = here.connect(&path);
    let mut read = vec![0; 64 << 10];
    client.read(0, &mut read).unwrap();
    // Bytes beyond the new end can be read only if they are cached.
    File::options().write(true).open(&path).unwrap().set_len(512 << 10).unwrap();
    let mut large = vec![0; 1 << 20];
    assert!(client.read(0, &mut large).unwrap_err().to_string().contains("error 5"));
    assert!(client.read(1020 << 10, &mut read[..4096]).is_err());
    client.read(0, &mut read).unwrap();
    assert!(read == content[..64 << 10]);
    assert!(client.read(1 << 20, &mut read[..1]).is_err());
    assert!(client.write(1 << 20, &[1]).is_err());
    client.flush().unwrap();
}

#[test]
fn an_image_that_grows_has_room_to() {
    if !is_root() {
        return;
    }
    let here = Here::new(Bytes::mib(8));
    // The header of an image, of a guest's disk of 100 MiB.
    let mut head = b"QFI\xfb\0\0\0\x03".to_vec();
    head.resize(24, 0);
    head.extend((100_u64 << 20).to_be_bytes());
    head.resize(5000, 1);
    let path = here.dir.path().join("image.qcow2");
    fs::write(&path, &head).unwrap();
    let mut client = here.connect(&path);
    assert!(client.size() > Bytes::mib(200), "{}", client.size());
    let mut read = vec![9; 10_000];
    client.read(0, &mut read).unwrap();
    assert!(read[..5000] == head && read[5000..].iter().all(|byte| *byte == 0));
    client.write(150 << 20, &[8; 600]).unwrap();
    client.flush().unwrap();
    here.resize(Bytes::ZERO);
    client.read((150 << 20) - 100, &mut read).unwrap();
    assert!(
        read[..100].iter().all(|byte| *byte == 0) && read[100..700] == [8; 600] && read[700] == 0
    );
}

#[test]
fn there_is_one_cache_of_a_group_and_nothing_is_left_of_it() {
    if !is_root() {
        return;
    }
    let mut here = Here::new(Bytes::ZERO);
    let again = Service::start(&here.regions(), here.group.clone(), Options::default());
    assert!(matches!(again, Err(CacheError::Busy(_))), "{again:?}");
    let red: Group = "red".parse().unwrap();
    assert_eq!(cache::status(&here.regions(), &red).unwrap(), None);
    assert_eq!(cache::resize(&here.regions(), &red, Bytes::mib(1)).unwrap(), None);
    drop(Service::start(&here.regions(), red, Options::default()).unwrap());
    assert!(here.has_mounts());
    here.service = None;
    assert_eq!(cache::status(&here.regions(), &here.group).unwrap(), None);
    assert!(!here.has_mounts());
}

#[test]
fn a_disk_moves_from_one_cache_to_another_with_its_vm() {
    if !is_root() {
        return;
    }
    let (from, to) = (Here::new(Bytes::mib(8)), Here::new(Bytes::mib(8)));
    let (path, mut content) = from.disk("disk", 1 << 20);
    let arriving = format!("{ARRIVING}{}", path.display());
    let release = |here: &Here| {
        cache::release(&here.regions(), &here.group, &path).unwrap().unwrap().disks[0].held
    };
    let mut source = from.connect(&path);
    // As for any other process, the disk is locked, but not for a VM that comes from there.
    let refused = to.export(path.to_str().unwrap()).unwrap_err().to_string();
    assert!(refused.contains("another process has it open"), "{refused}");
    let mut destination = to.export(&arriving).unwrap();
    let mut read = vec![0; content.len()];
    for round in 1..4 {
        source.write(round * 4096 + 7, &[round as u8; 9000]).unwrap();
        content[round as usize * 4096 + 7..][..9000].fill(round as u8);
        destination.read(0, &mut read).unwrap();
        assert!(read == content, "round {round}");
    }
    assert_eq!((to.status().used, to.status().disks[0].held), (Bytes::ZERO, false));
    // The first write waits until the source lets go.
    let writing = std::thread::spawn(move || {
        destination.write(5, &[9; 5000]).unwrap();
        destination
    });
    let mut source_read = vec![0; content.len()];
    source.write(512 << 10, &[4; 4096]).unwrap();
    content[512 << 10..][..4096].fill(4);
    source.read(0, &mut source_read).unwrap();
    assert!(source_read == content && !to.status().disks[0].held);
    assert!(!release(&from));
    assert_eq!(from.status().used, Bytes::ZERO);
    let mut destination = writing.join().unwrap();
    content[5..][..5000].fill(9);
    for _ in 0..2 {
        destination.read(0, &mut read).unwrap();
        assert!(read == content);
    }
    assert!(to.status().disks[0].held && to.status().counts.hits >= 256);
    // The source's QEMU is still connected, and sees what the destination writes.
    source.read(0, &mut source_read).unwrap();
    assert!(source_read == content);
    // The VM runs at the source again.
    assert!(!release(&to));
    source.write(0, &[8; 100]).unwrap();
    content[..100].fill(8);
    destination.read(0, &mut read).unwrap();
    assert!(read == content && from.status().disks[0].held);
    assert!(!release(&from), "the word comes twice");
    assert!(!release(&from));
    // No disk that is not open is locked.
    drop(destination);
    until(|| to.status().disks.is_empty());
    cache::release(&to.regions(), &to.group, &path).unwrap().unwrap();
    let none = cache::release(&to.regions(), &to.group, &path.with_extension("none"));
    assert!(none.unwrap_err().to_string().contains("cannot unlock"));
}
