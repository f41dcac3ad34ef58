//! Tests of the server with standard tools: libnbd, QEMU, fio and nbdfuse.

use std::fs;
use std::path::Path;
use std::process::{Child, Command};

use aquifer_page::{Bytes, PAGE_SIZE};

use super::harness::{Served, contents, run, tool};
use crate::common::{pattern, wait_until};

const MIB: usize = 1 << 20;

/// Writes an image with data, and zeroes in whole and partial pages, to `path`; returns its
/// content.
fn sparse_image(path: &Path, size: usize) -> Vec<u8> {
    let mut image = vec![0; size];
    image[..MIB].copy_from_slice(&pattern(MIB, 1));
    image[3 * MIB + 100..3 * MIB + 5000].copy_from_slice(&pattern(4900, 2));
    image[size - 4096..].copy_from_slice(&pattern(4096, 3));
    fs::write(path, &image).unwrap();
    image
}

#[test]
fn nbdinfo_tells_what_is_there() {
    let served = Served::new(Bytes::mib(16));
    served.add("second", Bytes::mib(1));
    served.lease.write(MIB as u64, &pattern(MIB, 1)).unwrap();

    let info: serde_json::Value =
        serde_json::from_str(&run(tool("nbdinfo --json").arg(served.uri()))).unwrap();
    let export = &info["exports"][0];
    assert_eq!(info["protocol"], "newstyle-fixed");
    assert_eq!(export["export-size"], 16 << 20);
    for able in [
        "can_trim",
        "can_zero",
        "can_flush",
        "can_fua",
        "can_multi_conn",
        "can_df",
        "can_cache",
        "can_fast_zero",
    ] {
        assert_eq!(export[able], true, "{able}");
    }
    assert_eq!(
        (&export["is_read_only"], &export["block_size_preferred"]),
        (&false.into(), &4096.into())
    );

    let map: serde_json::Value =
        serde_json::from_str(&run(tool("nbdinfo --map --json").arg(served.uri()))).unwrap();
    let runs: Vec<_> = map
        .as_array()
        .unwrap()
        .iter()
        .map(|run| (run["offset"].as_u64(), run["type"].as_u64()))
        .collect();
    assert_eq!(runs, [(Some(0), Some(3)), (Some(1 << 20), Some(0)), (Some(2 << 20), Some(3))]);

    let list = run(tool("nbdinfo --list").arg(served.uri()));
    assert!(list.contains("export=\"second\""), "{list}");
}

#[test]
fn nbdcopy_copies_there_and_back_and_keeps_holes() {
    let served = Served::new(Bytes::mib(16));
    let (there, back) = (served.path("there"), served.path("back"));
    let image = sparse_image(&there, 16 * MIB);
    run(tool("nbdcopy").arg(&there).arg(served.uri()));
    assert!(contents(&served.lease) == image);
    assert_eq!(
        served.lease.stored(),
        Bytes(MIB as u64 + 3 * PAGE_SIZE as u64),
        "1 MiB, two pages cut, one at the end"
    );
    run(tool("nbdcopy --connections=4 --requests=32").arg(served.uri()).arg(&back));
    assert!(fs::read(&back).unwrap() == image);
}

#[test]
fn libnbd_finds_every_command_doing_what_it_should() {
    let served = Served::new(Bytes::mib(16));
    // Debian installs python3-libnbd for this interpreter; the path may name another one first.
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/nbd/nbd_server/commands.py");
    run(tool("/usr/bin/python3").arg(script).arg(served.uri()));
    wait_until("both have left", || served.connections() == 0);
}

#[test]
fn qemu_img_converts_maps_and_compares() {
    let served = Served::new(Bytes::mib(16));
    let raw = served.path("raw");
    let image = sparse_image(&raw, 16 * MIB);
    run(tool("qemu-img convert -n -f raw -O raw").arg(&raw).arg(served.uri()));
    assert!(contents(&served.lease) == image);
    run(tool("qemu-img compare -f raw -F raw").arg(&raw).arg(served.uri()));
    let map = run(tool("qemu-img map --output=json -f raw").arg(served.uri()));
    let map: serde_json::Value = serde_json::from_str(&map).unwrap();
    let stored = map.as_array().unwrap().iter().filter(|run| run["data"] == true);
    assert_eq!(
        stored.filter_map(|run| run["length"].as_u64()).sum::<u64>(),
        served.lease.stored().0
    );
    let qcow = served.path("qcow2");
    run(tool("qemu-img convert -f raw -O qcow2").arg(served.uri()).arg(&qcow));
    run(tool("qemu-img compare -f qcow2 -F raw").arg(&qcow).arg(&raw));
    run(tool("qemu-img bench -c 2000 -d 32 -w -f raw").arg(served.uri()));
}

#[test]
fn fio_verifies_what_it_wrote() {
    let served = Served::new(Bytes::mib(64));
    let job = "fio --name=check --ioengine=nbd --rw=randwrite --bsrange=512-128k --size=64M \
               --iodepth=32 --verify=crc32c --verify_fatal=1 --randrepeat=0";
    let output =
        run(tool(job).arg(format!("--uri={}", served.uri())).current_dir(served.dir.path()));
    assert!(output.contains("err= 0"), "{output}");
}

/// A mounted nbdfuse; dropping it unmounts it.
struct Mounted<'a>(&'a Path, Child);

impl Drop for Mounted<'_> {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(self.0).status();
        let _ = self.1.wait();
    }
}

#[test]
fn nbdfuse_makes_a_file_of_it() {
    let served = Served::new(Bytes::mib(16));
    let file = served.path("file");
    fs::write(&file, "").unwrap();
    let child = tool("nbdfuse").arg(&file).arg(served.uri()).spawn().unwrap();
    let _mounted = Mounted(&file, child);
    wait_until("mounted", || fs::metadata(&file).is_ok_and(|metadata| metadata.len() == 16 << 20));
    let data = pattern(3 * MIB, 9);
    let opened = fs::File::options().read(true).write(true).open(&file).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&opened, &data, 12345).unwrap();
    opened.sync_all().unwrap();
    assert!(contents(&served.lease)[12345..12345 + data.len()] == data);
    let mut back = vec![0; data.len()];
    std::os::unix::fs::FileExt::read_exact_at(&opened, &mut back, 12345).unwrap();
    assert!(back == data);
}
