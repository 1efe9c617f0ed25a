// SPDX-License-Identifier: GPL-2.0
/*
 * Functions for what the kernel offers as a macro or a static inline only.
 *
 * None of them is on the path of a work request or of a completion: `ib_post_send()`,
 * `ib_post_recv()` and `ib_poll_cq()` are one indirect call each, which Rust makes itself.
 */
#include <linux/cpu.h>
#include <linux/debugfs.h>
#include <linux/inetdevice.h>
#include <linux/netdevice.h>
#include <linux/preempt.h>
#include <linux/printk.h>
#include <linux/rcupdate.h>
#include <linux/sched.h>
#include <linux/string.h>
#include <linux/workqueue.h>
#include <rdma/ib_cache.h>
#include <rdma/ib_verbs.h>
#include <rdma/rdma_cm.h>
#include <rdma_bindings.h>

/* As far as the configuration lets anybody know: without PREEMPT_COUNT a spinlock held is not seen. */
static __always_inline bool may_sleep(void)
{
	return in_task() && !in_atomic() && !irqs_disabled() && !rcu_preempt_depth();
}

bool rust_helper_rdma_may_sleep(void)
{
	return may_sleep();
}

/* As the above, but never true by mistake: without PREEMPT_COUNT nothing is sure. */
bool rust_helper_rdma_surely_may_sleep(void)
{
	return preemptible() && may_sleep();
}

enum rdma_execution_context rust_helper_rdma_execution(void)
{
	if (in_serving_softirq())
		return in_hardirq() || in_nmi() ? RDMA_EXECUTION_OTHER : RDMA_EXECUTION_SOFTIRQ;
	return current->flags & PF_WQ_WORKER && may_sleep() ? RDMA_EXECUTION_WORKER : RDMA_EXECUTION_OTHER;
}

/* Without CPU hotplug these are empty, and the kernel's bindings have none. */
void rust_helper_rdma_cpus_read_lock(void)
{
	cpus_read_lock();
}

void rust_helper_rdma_cpus_read_unlock(void)
{
	cpus_read_unlock();
}

bool rust_helper_rdma_may_log(void)
{
	return printk_ratelimit();
}

bool rust_helper_rdma_queue_work(struct work_struct *work)
{
	return queue_work(system_dfl_wq, work);
}

u64 rust_helper_ib_dma_map_single(struct ib_device *dev, void *addr, size_t size,
				  enum dma_data_direction dir)
{
	return ib_dma_map_single(dev, addr, size, dir);
}

int rust_helper_ib_dma_mapping_error(struct ib_device *dev, u64 addr)
{
	return ib_dma_mapping_error(dev, addr);
}

void rust_helper_ib_dma_unmap_single(struct ib_device *dev, u64 addr, size_t size,
				     enum dma_data_direction dir)
{
	ib_dma_unmap_single(dev, addr, size, dir);
}

void rust_helper_ib_dma_sync_single_for_cpu(struct ib_device *dev, u64 addr, size_t size,
					    enum dma_data_direction dir)
{
	ib_dma_sync_single_for_cpu(dev, addr, size, dir);
}

void rust_helper_ib_dma_sync_single_for_device(struct ib_device *dev, u64 addr, size_t size,
					       enum dma_data_direction dir)
{
	ib_dma_sync_single_for_device(dev, addr, size, dir);
}

bool rust_helper_ib_uses_virt_dma(struct ib_device *dev)
{
	return ib_uses_virt_dma(dev);
}

bool rust_helper_rdma_protocol_iwarp(struct ib_device *dev, u32 port)
{
	return rdma_protocol_iwarp(dev, port);
}

bool rust_helper_rdma_protocol_roce(struct ib_device *dev, u32 port)
{
	return rdma_protocol_roce(dev, port);
}

enum rdma_ah_attr_type rust_helper_rdma_ah_find_type(struct ib_device *dev, u32 port)
{
	return rdma_ah_find_type(dev, port);
}

void rust_helper_rdma_ah_set_dlid(struct rdma_ah_attr *attr, u32 dlid)
{
	rdma_ah_set_dlid(attr, dlid);
}

bool rust_helper_rdma_port_ipv4(struct ib_device *dev, u32 port, __be32 *address)
{
	struct net_device *ndev = ib_device_get_netdev(dev, port);
	const struct in_ifaddr *ifa = NULL;
	const struct in_device *in_dev;

	if (!ndev)
		return false;
	rcu_read_lock();
	in_dev = __in_dev_get_rcu(ndev);
	if (in_dev)
		ifa = rcu_dereference(in_dev->ifa_list);
	if (ifa)
		*address = ifa->ifa_local;
	rcu_read_unlock();
	dev_put(ndev);
	return ifa;
}

bool rust_helper_rdma_port_netdev_name(struct ib_device *dev, u32 port, char *name)
{
	struct net_device *ndev = ib_device_get_netdev(dev, port);

	if (!ndev)
		return false;
	strscpy(name, ndev->name, IFNAMSIZ);
	dev_put(ndev);
	return true;
}

struct rdma_cm_id *rust_helper_rdma_create_kernel_id(struct ib_device *dev,
						     rdma_cm_event_handler event, void *context,
						     const char *caller)
{
	return __rdma_create_kernel_id(rdma_dev_net(dev), event, context, RDMA_PS_TCP, IB_QPT_RC,
				       caller);
}

/* Without debugfs these are static inline, and refuse. */
struct dentry *rust_helper_rdma_debugfs_create_dir(const char *name, struct dentry *parent)
{
	return debugfs_create_dir(name, parent);
}

struct dentry *rust_helper_rdma_debugfs_create_file(const char *name, unsigned short mode,
						    struct dentry *parent, void *data,
						    const struct file_operations *fops)
{
	return debugfs_create_file_unsafe(name, mode, parent, data, fops);
}

void rust_helper_rdma_debugfs_remove(struct dentry *dentry)
{
	debugfs_remove(dentry);
}

int rust_helper_rdma_debugfs_get(struct file *file)
{
	return debugfs_file_get(file->f_path.dentry);
}

void rust_helper_rdma_debugfs_put(struct file *file)
{
	debugfs_file_put(file->f_path.dentry);
}
