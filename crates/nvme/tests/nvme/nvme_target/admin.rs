//! The description of a controller and its namespace: Identify, log pages, features.

use aquifer_nvme::proto::command::{Sgl, admin, io};
use aquifer_nvme::proto::feature::{SAVE, id};
use aquifer_nvme::proto::identify::{Controller, Namespace, NvmController, descriptor, what};
use aquifer_nvme::proto::log::{Effects, FirmwareSlots, Smart, page};
use aquifer_nvme::proto::{Command, NvmeStatus};
use aquifer_page::{Bytes, PAGE_SIZE};
use zerocopy::FromBytes;

use super::harness::Served;
use crate::common::{pattern, wait_until};

#[test]
fn a_controller_and_its_namespace_are_identified() {
    let served = Served::new(Bytes::mib(4));
    let (mut host, id) = served.admin();
    let controller =
        Controller::read_from_bytes(&host.identify(what::CONTROLLER, 0).unwrap()).unwrap();
    assert_eq!(controller.id.get(), id);
    assert_eq!(controller.subsystem, served.subsystem.to_field());
    assert_eq!((controller.command_size, controller.completion_size), (0x66, 0x44));
    assert_eq!(controller.command_capsule.get(), (64 + (64 << 10)) / 16);
    assert!(controller.serial.starts_with(&served.lease.id().to_string().as_bytes()[..20]));

    served.lease.write(0, &pattern(5 * PAGE_SIZE, 1)).unwrap();
    let namespace =
        Namespace::read_from_bytes(&host.identify(what::NAMESPACE, 1).unwrap()).unwrap();
    assert_eq!((namespace.size.get(), namespace.used.get()), (1024, 5));
    assert_eq!(namespace.block_formats[0].data, 12);
    assert_eq!(host.identify(what::NAMESPACE_OF_SET, 1).unwrap(), vec![0; 4096]);
    let set = NvmController::read_from_bytes(&host.identify(what::CONTROLLER_OF_SET, 0).unwrap())
        .unwrap();
    assert_eq!(set.write_zeroes_limit, 16);

    for list in [what::ACTIVE_NAMESPACES, what::ACTIVE_NAMESPACES_OF_SET] {
        assert_eq!(host.identify(list, 0).unwrap()[..8], [1, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(host.identify(list, 1).unwrap()[..4], [0; 4]);
    }
    let list = host.identify(what::DESCRIPTORS, 1).unwrap();
    assert_eq!(list[..4], [descriptor::UUID, 16, 0, 0]);
    assert_eq!(list[4..20], served.lease.id().0.to_be_bytes());
    assert_eq!(list[20..29], [descriptor::COMMAND_SET, 1, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(host.identify(what::NAMESPACE_INDEPENDENT, 1).unwrap()[14], 1);
    assert_eq!(host.identify(what::COMMAND_SETS, 0).unwrap()[0], 1);

    for wanted in [what::NAMESPACE, what::DESCRIPTORS, what::NAMESPACE_INDEPENDENT] {
        assert_eq!(host.identify(wanted, 2).unwrap_err(), NvmeStatus::INVALID_NAMESPACE);
    }
    assert_eq!(host.identify(0x77, 1).unwrap_err(), NvmeStatus::INVALID_FIELD);
    assert_eq!(
        host.identify(what::ACTIVE_NAMESPACES, u32::MAX).unwrap_err(),
        NvmeStatus::INVALID_NAMESPACE
    );
}

#[test]
fn logs_can_be_read_whole_and_in_parts() {
    let served = Served::new(Bytes::mib(4));
    let (mut host, controller) = served.admin();
    let mut io = served.io(controller, 1, 0);
    io.write(0, &pattern(16 * PAGE_SIZE, 1));
    io.read(0, 1);
    wait_until("the tally is told", || {
        let (mut host, _) = served.admin();
        let smart = Smart::read_from_bytes(&host.log(page::SMART, 0, 512).unwrap()).unwrap();
        assert_eq!(smart.spare, 100);
        (smart.reads[0].get(), smart.writes[0].get()) == (1, 1) && smart.data_written[0].get() == 1
    });
    let slots =
        FirmwareSlots::read_from_bytes(&host.log(page::FIRMWARE_SLOTS, 0, 512).unwrap()).unwrap();
    assert_eq!(slots.active, 1);
    assert_eq!(host.log(page::ERROR, 0, 64).unwrap(), [0; 64]);
    let whole = host.log(page::EFFECTS, 0, 4096).unwrap();
    let effects = Effects::read_from_bytes(&whole).unwrap();
    assert_eq!(effects.admin[usize::from(admin::IDENTIFY)].get(), 1);
    assert_eq!(effects.io[usize::from(io::WRITE)].get(), 3);
    assert_eq!(host.log(page::EFFECTS, 1000, 200).unwrap(), whole[1000..1200]);
    let beyond = host.log(page::EFFECTS, 4000, 200).unwrap();
    assert_eq!((&beyond[..96], &beyond[96..]), (&whole[4000..], &[0; 104][..]));
    let supported = host.log(page::SUPPORTED, 0, 1024).unwrap();
    assert_eq!(supported.iter().filter(|&&byte| byte == 1).count(), 6);

    assert_eq!(host.log(0x0C, 0, 64), Err(NvmeStatus::INVALID_LOG_PAGE));
    assert_eq!(host.log(page::DISCOVERY, 0, 64), Err(NvmeStatus::INVALID_LOG_PAGE));
    assert_eq!(host.log(page::SMART, 1024, 64), Err(NvmeStatus::INVALID_FIELD));
    assert_eq!(host.log(page::SMART, 2, 64), Err(NvmeStatus::INVALID_FIELD));
}

#[test]
fn features_can_be_read_and_those_that_mean_something_be_set() {
    let served = Served::new(Bytes::mib(4));
    let (mut host, _) = served.admin_with(0, 60_000);
    let mut get = |feature: u8| {
        let command = host.command(admin::GET_FEATURES, Sgl::NONE).with(10, feature.into());
        host.execute(&command, &[])
    };
    assert_eq!(get(id::QUEUES).result.get(), 63 << 16 | 63);
    assert_eq!(get(id::KEEP_ALIVE).result.get(), 60_000);
    assert!(get(id::ARBITRATION).status().is_success());
    assert_eq!(get(id::WRITE_CACHE).status().code(), NvmeStatus::INVALID_FIELD.code());

    let set = |feature: u8, value| {
        move |command: Command| command.with(10, feature.into()).with(11, value)
    };
    for (set, status) in [
        (set(id::QUEUES, 1 << 16 | 1), NvmeStatus::SUCCESS),
        (set(id::QUEUES, 0xFFFF), NvmeStatus::INVALID_FIELD),
        (set(id::KEEP_ALIVE, 30_000), NvmeStatus::SUCCESS),
        (set(id::HOST_ID, 1), NvmeStatus::COMMAND_SEQUENCE),
        (set(id::ARBITRATION, 1), NvmeStatus::FEATURE_NOT_CHANGEABLE),
        (set(0x55, 1), NvmeStatus::INVALID_FIELD),
    ] {
        let command = set(host.command(admin::SET_FEATURES, Sgl::NONE));
        assert_eq!(host.status(&command, &[]), status);
    }
    let command =
        host.command(admin::SET_FEATURES, Sgl::NONE).with(10, SAVE | u32::from(id::KEEP_ALIVE));
    assert_eq!(host.status(&command, &[]), NvmeStatus::FEATURE_NOT_SAVEABLE);
    let command = host.command(admin::GET_FEATURES, Sgl::NONE).with(10, id::KEEP_ALIVE.into());
    assert_eq!(host.execute(&command, &[]).result.get(), 30_000);
    let command =
        host.command(admin::GET_FEATURES, Sgl::transport(16)).with(10, id::HOST_ID.into());
    assert_eq!(host.fetch(&command.with(11, 1), 16).unwrap(), [7; 16]);
}
