// A program that holds kafkajs clients for the tests; see ../programs.py for the lines it reads.
'use strict'
const readline = require('readline')
const { AssignerProtocol, CompressionCodecs, CompressionTypes, Kafka, logLevel } = require('kafkajs')
const { ZstdCodec } = require('zstd-codec')

const zstd = new Promise((resolve) => ZstdCodec.run((found) => resolve(new found.Streaming())))
CompressionCodecs[CompressionTypes.Snappy] = require('kafkajs-snappy')
CompressionCodecs[CompressionTypes.ZSTD] = () => ({
  compress: async (encoder) => Buffer.from((await zstd).compress(encoder.buffer)),
  decompress: async (data) => Buffer.from((await zstd).decompress(data)),
})
const CODECS = {
  none: CompressionTypes.None, gzip: CompressionTypes.GZIP, snappy: CompressionTypes.Snappy,
  zstd: CompressionTypes.ZSTD,
}

const text = (word) => (word === null ? null : word.toString())
const number = (word) => Number(text(word))
const bytes = (value) => (value === null || value === undefined ? null : Buffer.from(String(value)))

const kafka = (address) => new Kafka({
  clientId: 'kafkajs', brokers: [address], logLevel: logLevel.NOTHING,
  retry: { initialRetryTime: 50, maxRetryTime: 1000, retries: 8 },
})

async function administer(address, act) {
  const admin = kafka(address).admin()
  await admin.connect()
  try {
    return await act(admin)
  } finally {
    await admin.disconnect()
  }
}

// ---- producers ----

class Producer {
  static async made([address, codec, acks, idempotent, id]) {
    const self = new Producer()
    self.codec = CODECS[text(codec)]
    self.acks = number(acks)
    self.producer = kafka(text(address)).producer({
      allowAutoTopicCreation: true, maxInFlightRequests: 1, transactionalId: text(id) || undefined,
      idempotent: number(idempotent) === 1 || id !== null,
    })
    await self.producer.connect()
    if (id !== null) { // the id is taken from an older producer now, not at the first record
      await (await self.producer.transaction()).abort()
    }
    return self
  }

  async flush(words) {
    const topics = new Map()
    for (let i = 0; i < words.length;) {
      const [topic, partition, timestamp, value, key, count] = words.slice(i, i + 6)
      const headers = {}
      for (i += 6; i < words.length && Object.values(headers).flat().length < number(count); i += 2) {
        const name = text(words[i])
        headers[name] = name in headers ? [headers[name], words[i + 1]].flat() : words[i + 1]
      }
      const messages = topics.get(text(topic)) || []
      messages.push({ partition: number(partition), timestamp: text(timestamp), value, key, headers })
      topics.set(text(topic), messages)
    }
    const topicMessages = [...topics].map(([topic, messages]) => ({ topic, messages }))
    if (topicMessages.length > 0) {
      await (this.transaction || this.producer)
        .sendBatch({ acks: this.acks, compression: this.codec, topicMessages })
    }
  }

  async begin() {
    this.transaction = await this.producer.transaction()
  }

  async end([how]) {
    const transaction = this.transaction
    this.transaction = null
    await transaction[text(how)]()
  }

  async offsets([topic, partition, offset, reader]) {
    await this.transaction.sendOffsets({
      consumerGroupId: objects.get(number(reader)).group,
      topics: [{ topic: text(topic), partitions: [{ partition: number(partition), offset: text(offset) }] }],
    })
  }

  async close() {
    await this.producer.disconnect()
  }
}

// ---- consumers ----

// kafkajs has one assignor, with a name of its own.  These have the names of the other clients.
const assignor = (name) => () => ({
  name, version: 1,
  protocol: ({ topics }) => ({
    name,
    metadata: AssignerProtocol.MemberMetadata.encode({ version: 0, topics, userData: Buffer.alloc(0) }),
  }),
  assign: async ({ members, topics, cluster }) => {
    const ids = members.map((each) => each.memberId).sort()
    const mine = Object.fromEntries(ids.map((id) => [id, {}]))
    let next = 0
    for (const topic of topics) {
      const partitions = cluster.findTopicPartitionMetadata(topic).map((each) => each.partitionId).sort((a, b) => a - b)
      partitions.forEach((partition, index) => {
        const at = name === 'range' ? Math.floor((index * ids.length) / partitions.length) : next++
        const id = ids[at % ids.length]
        mine[id][topic] = [...(mine[id][topic] || []), partition]
      })
    }
    return ids.map((memberId) => ({
      memberId,
      memberAssignment: AssignerProtocol.MemberAssignment.encode({ version: 0, assignment: mine[memberId], userData: Buffer.alloc(0) }),
    }))
  },
})

let groups = 0

class Consumer {
  static async made([address, group, name, instance, isolation, start, ...topics]) {
    const self = new Consumer()
    Object.assign(self, {
      address: text(address), group: text(group), assignor: text(name), rows: [], wake: () => {}, owned: {},
      positions: new Map(), committedOnly: text(isolation) === 'read_committed', earliest: text(start) === 'earliest',
    })
    if (topics.length > 0) {
      await self.start(topics.map(text), null)
    }
    return self
  }

  async start(topics, only) {
    let ready = only === null
    this.consumer = kafka(this.address).consumer({
      groupId: this.group, sessionTimeout: 10000, heartbeatInterval: 200, maxWaitTimeInMs: 100,
      readUncommitted: !this.committedOnly, allowAutoTopicCreation: false, metadataMaxAge: 1000,
      partitionAssigners: [(parts) => {
        const made = assignor(this.assignor)()
        return { ...made, assign: (asked) => made.assign({ ...asked, cluster: parts.cluster }) }
      }],
    })
    const rows = (this.rows = [])
    this.consumer.on(this.consumer.events.GROUP_JOIN, ({ payload }) => { this.owned = payload.memberAssignment })
    await this.consumer.connect()
    await this.consumer.subscribe({ topics, fromBeginning: this.earliest })
    await this.consumer.run({
      autoCommit: false, eachBatchAutoResolve: true,
      eachBatch: async ({ batch, isStale }) => {
        if (ready && !isStale() && (only === null || only.partition === batch.partition)) {
          rows.push(...batch.messages.map((each) => [batch.topic, batch.partition, each]))
          this.wake()
        }
      },
    })
    if (only !== null) {
      this.consumer.seek(only)
      ready = true
    }
  }

  // kafkajs reads only in a group; the seek is for its first fetch.
  async assign([topic, partition, at]) {
    if (this.consumer) await this.consumer.disconnect()
    this.group = `kafkajs-alone-${process.pid}-${++groups}`
    const offset = await administer(this.address, async (admin) => {
      const offsets = await admin.fetchTopicOffsets(text(topic))
      const found = offsets.find((each) => each.partition === number(partition))
      return { start: found.low, end: found.high }[text(at)] || text(at)
    })
    await this.start([text(topic)], { topic: text(topic), partition: number(partition), offset })
  }

  async offset_at([topic, partition, timestamp]) {
    return administer(this.address, async (admin) => {
      const one = (all) => all.find((each) => each.partition === number(partition)).offset
      const found = one(await admin.fetchTopicOffsetsByTimestamp(text(topic), number(timestamp)))
      return [found === one(await admin.fetchTopicOffsets(text(topic))) ? null : bytes(found)]
    })
  }

  async poll([timeout]) {
    if (this.rows.length === 0) {
      await new Promise((resolve) => {
        const timer = setTimeout(resolve, number(timeout))
        this.wake = () => { clearTimeout(timer); resolve() }
      })
    }
    return this.rows.splice(0).flatMap(([topic, partition, each]) => {
      this.positions.set(`${partition} ${topic}`, { topic, partition, offset: String(BigInt(each.offset) + 1n) })
      const headers = Object.entries(each.headers || {})
        .flatMap(([name, value]) => [value].flat().flatMap((one) => [bytes(name), one]))
      return [bytes(topic), bytes(partition), bytes(each.offset), bytes(each.timestamp), each.value, each.key,
        bytes(headers.length / 2), ...headers]
    })
  }

  async assignment() {
    return Object.entries(this.owned).flatMap(([topic, each]) => each.flatMap((one) => [bytes(topic), bytes(one)]))
  }

  async commit() {
    const mine = [...this.positions.values()].filter((each) => (this.owned[each.topic] || []).includes(each.partition))
    await this.consumer.commitOffsets(mine)
  }

  async committed([topic, partition]) {
    return administer(this.address, async (admin) => {
      const [found] = await admin.fetchOffsets({ groupId: this.group, topics: [text(topic)] })
      const { offset } = found.partitions.find((each) => each.partition === number(partition))
      return [Number(offset) < 0 ? null : bytes(offset)]
    })
  }

  async close() {
    if (this.consumer) await this.consumer.disconnect()
  }
}

// ---- administration ----

const ADMIN = {
  create: async (admin, [name, count]) => {
    if (!(await admin.createTopics({ topics: [{ topic: text(name), numPartitions: number(count) }] }))) throw new Error('the topic exists')
  },
  grow: (admin, [name, count]) => admin.createPartitions({ topicPartitions: [{ topic: text(name), count: number(count) }] }),
  topics: async (admin) => {
    const { topics } = await admin.fetchTopicMetadata()
    return topics.sort((a, b) => (a.name < b.name ? -1 : 1)).flatMap((each) => [bytes(each.name), bytes(each.partitions.length)])
  },
  configure: (admin, [name, key, value]) => admin.alterConfigs({
    validateOnly: false, resources: [{ type: 2, name: text(name), configEntries: [{ name: text(key), value: text(value) }] }],
  }),
  trim: async (admin, [topic, partition, offset]) => {
    await admin.fetchTopicOffsets(text(topic)) // it must have metadata of the topic
    await admin.deleteTopicRecords({
      topic: text(topic), partitions: [{ partition: number(partition), offset: text(offset) }],
    })
  },
  groups: async (admin) => (await admin.listGroups()).groups.map((each) => bytes(each.groupId)),
  offsets: (admin, [groupId, topic, partition, offset]) => admin.setOffsets({
    groupId: text(groupId), topic: text(topic), partitions: [{ partition: number(partition), offset: text(offset) }],
  }),
  forget: (admin, [group]) => admin.deleteGroups([text(group)]),
  delete: (admin, [name]) => admin.deleteTopics({ topics: [text(name)] }),
}

// ---- the lines ----

const objects = new Map()

async function run(method, target, words) {
  if (method === 'admin') {
    const found = await administer(text(words[0]), (admin) => ADMIN[text(words[1])](admin, words.slice(2)))
    return Buffer.isBuffer((found || [])[0]) ? found : []
  }
  if (method === 'producer' || method === 'consumer') {
    const made = await { producer: Producer, consumer: Consumer }[method].made(words)
    objects.set(objects.size + 1, made)
    return [bytes(objects.size)]
  }
  return (await objects.get(target)[method](words)) || []
}

readline.createInterface({ input: process.stdin }).on('line', async (line) => {
  const [call, method, target, ...rest] = line.split(' ')
  const words = rest.map((each) => (each === '-' ? null : Buffer.from(each.slice(1), 'base64')))
  let found
  let status = 'ok'
  try {
    found = await run(method, Number(target), words)
  } catch (error) {
    status = 'error'
    found = [bytes(`${error.name}: ${error.message}`)]
  }
  const shown = found.map((each) => (each === null ? '-' : `=${each.toString('base64')}`))
  process.stdout.write(`${[call, status, ...shown].join(' ')}\n`)
}).on('close', () => process.exit(0))
